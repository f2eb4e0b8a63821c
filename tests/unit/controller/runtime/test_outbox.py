from __future__ import annotations

import asyncio
from collections.abc import Sequence

from everstep_controller.runtime.push import (
    HINTS_PER_LOOP_ITERATION,
    EncodedBody,
    Outbox,
    OutgoingDirective,
    generation_topic,
)


def outgoing(outbox: Outbox, node: str, body: str = "{}", *, topic: str = "") -> OutgoingDirective:
    return OutgoingDirective(
        node=node, seq=outbox.take_seq(node), body=EncodedBody(body), is_durable=not topic, topic=topic
    )


def seqs(outbox: Outbox, node: str, after: int = 0) -> list[int]:
    return [directive.seq for directive in outbox.pending(node, after)]


def test_outbox_acknowledgement_is_cumulative_and_pruned_once() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a") for _ in range(3)])
    outbox.acknowledge("a", 2)
    outbox.acknowledge("a", 1)
    assert seqs(outbox, "a") == [3]
    assert outbox.take_acknowledged() == {"a": 2}
    assert outbox.take_acknowledged() == {}


def test_outbox_newer_hint_replaces_older_of_same_topic() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a", topic="versions/j"), outgoing(outbox, "a")])
    outbox.deliver([outgoing(outbox, "a", topic="versions/j"), outgoing(outbox, "a", topic="versions/k")])
    assert seqs(outbox, "a") == [2, 3, 4]


def generation(outbox: Outbox, number: int = 1, *, at_boundary: bool = False, node: str = "a") -> OutgoingDirective:
    text = f'{{"type":"NewGeneration","spec":{{"job":"j","number":{number}}}}}'
    return OutgoingDirective(
        node=node,
        seq=outbox.take_seq(node),
        body=EncodedBody(text),
        topic=generation_topic("j"),
        replaces_older=not at_boundary,
    )


def test_outbox_keeps_only_the_latest_generation_per_job() -> None:
    outbox = Outbox(0)
    for number in range(1, 5):
        outbox.deliver([generation(outbox, number), outgoing(outbox, "a", f"kill {number}")])
    assert [directive.body.text for directive in outbox.pending("a")][-2:] == [
        generation(Outbox(0), 4).body.text,
        "kill 4",
    ]
    assert outbox.pending_count("a") == 5, "a generation, and four directives of other kinds"
    assert outbox.take_superseded() == [("a", 1), ("a", 3), ("a", 5)]
    assert outbox.take_superseded() == []


class Session:
    """A receiver of a node's directives."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.pushed: list[int] = []
        self.dismissed = False

    def push(self, directives: Sequence[OutgoingDirective]) -> None:
        self.pushed += [directive.seq for directive in directives]

    def dismiss(self) -> None:
        self.dismissed = True


def test_outbox_dismisses_session_of_other_incarnation() -> None:
    outbox, session = Outbox(0), Session(incarnation=1)
    outbox.attach("a", session)
    outbox.dismiss("a", 1)
    dismissed_by_own = session.dismissed
    outbox.dismiss("a", 2)
    assert (dismissed_by_own, session.dismissed) == (False, True)
    assert not outbox.has_receiver("a")


def test_outbox_close_dismisses_every_session() -> None:
    outbox, sessions = Outbox(0), [Session(), Session()]
    for node, session in zip("ab", sessions, strict=True):
        outbox.attach(node, session)
    outbox.close()
    assert [session.dismissed for session in sessions] == [True, True]


def test_outbox_sends_hints_in_small_groups_and_in_order() -> None:
    async def scenario() -> None:
        outbox, nodes = Outbox(0), [f"n{number}" for number in range(3 * HINTS_PER_LOOP_ITERATION)]
        sessions = {node: Session() for node in nodes}
        for node, session in sessions.items():
            outbox.attach(node, session)
        outbox.deliver([outgoing(outbox, node, topic="versions/j") for node in nodes])
        assert not any(session.pushed for session in sessions.values())
        outbox.deliver([outgoing(outbox, nodes[-1])])
        assert sessions[nodes[-1]].pushed == [1, 2]
        newer = Session()
        assert [directive.seq for directive in outbox.attach(nodes[-2], newer)] == [1]
        await asyncio.sleep(0)
        assert sum(bool(session.pushed) for session in sessions.values()) == HINTS_PER_LOOP_ITERATION + 1
        while not all(sessions[node].pushed for node in nodes[:-2]):
            await asyncio.sleep(0)
        assert all(sessions[node].pushed == [1] for node in nodes[:-2])
        assert newer.pushed == []

    asyncio.run(scenario())
