from __future__ import annotations

import asyncio
from collections.abc import Sequence

from everstep_controller.runtime.push import (
    HINTS_PER_LOOP_ITERATION,
    SEQ_PER_EPOCH,
    EncodedBody,
    Outbox,
    OutgoingDirective,
    generation_topic,
)
from everstep_controller.store.rows import OutboxRow


def outgoing(outbox: Outbox, node: str, body: str = "{}", *, topic: str = "") -> OutgoingDirective:
    return OutgoingDirective(
        node=node, seq=outbox.take_seq(node), body=EncodedBody(body), is_durable=not topic, topic=topic
    )


def seqs(outbox: Outbox, node: str, after: int = 0) -> list[int]:
    return [one.seq for one in outbox.pending(node, after)]


def test_outbox_numbers_grow_across_controller_runs() -> None:
    first, second = Outbox(1), Outbox(2)
    assert [first.take_seq("a"), first.take_seq("a"), first.take_seq("b")] == [
        SEQ_PER_EPOCH + 1,
        SEQ_PER_EPOCH + 2,
        SEQ_PER_EPOCH + 1,
    ]
    assert second.take_seq("a") == 2 * SEQ_PER_EPOCH + 1


def test_outbox_orders_stored_directives_first() -> None:
    outbox = Outbox(
        2,
        [OutboxRow(node="a", seq=SEQ_PER_EPOCH + 4, body="{}"), OutboxRow(node="a", seq=SEQ_PER_EPOCH + 5, body="{}")],
    )
    outbox.deliver([outgoing(outbox, "a")])
    assert seqs(outbox, "a") == [SEQ_PER_EPOCH + 4, SEQ_PER_EPOCH + 5, 2 * SEQ_PER_EPOCH + 1]
    assert outbox.oldest_seq("a") == SEQ_PER_EPOCH + 4


def test_outbox_acknowledgement_is_cumulative_and_pruned_once() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a") for _ in range(3)])
    outbox.acknowledge("a", 2)
    outbox.acknowledge("a", 1)
    assert seqs(outbox, "a") == [3]
    assert outbox.take_acknowledged() == {"a": 2}
    assert outbox.take_acknowledged() == {}


def test_outbox_forget_keeps_only_the_sequence_number() -> None:
    outbox = Outbox(0)
    for node in ("a", "b"):
        outbox.deliver([outgoing(outbox, node), outgoing(outbox, node), generation(outbox, node=node)])
        outbox.deliver([generation(outbox, node=node)])
        outbox.acknowledge(node, 1)
    outbox.forget("a")
    assert (seqs(outbox, "a"), outbox.total_pending()) == ([], 2)
    assert outbox.take_acknowledged() == {"b": 1}
    assert outbox.take_superseded() == [("b", 3)]
    assert outbox.take_seq("a") == 5


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
    assert [one.body.text for one in outbox.pending("a")][-2:] == [generation(Outbox(0), 4).body.text, "kill 4"]
    assert outbox.pending_count("a") == 5, "a generation, and four directives of other kinds"
    assert outbox.take_superseded() == [("a", 1), ("a", 3), ("a", 5)]
    assert outbox.take_superseded() == []


def test_outbox_keeps_generation_before_pending_boundary() -> None:
    outbox = Outbox(0)
    outbox.deliver([generation(outbox, 1)])
    outbox.deliver([generation(outbox, 2, at_boundary=True)])
    assert seqs(outbox, "a") == [1, 2]
    outbox.deliver([generation(outbox, 3)])
    assert seqs(outbox, "a") == [3]


def test_outbox_stored_generation_gives_way_to_newer() -> None:
    stored = generation(Outbox(0), 1).body.text
    outbox = Outbox(
        2,
        [
            OutboxRow(node="a", seq=SEQ_PER_EPOCH + 4, body=stored),
            OutboxRow(node="a", seq=SEQ_PER_EPOCH + 5, body="{}"),
        ],
    )
    outbox.deliver([generation(outbox, 2)])
    assert seqs(outbox, "a") == [SEQ_PER_EPOCH + 5, 2 * SEQ_PER_EPOCH + 1]
    assert outbox.take_superseded() == [("a", SEQ_PER_EPOCH + 4)]


class Session:
    """What takes a node's directives."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation = incarnation
        self.pushed: list[int] = []
        self.dismissed = False

    def push(self, directives: Sequence[OutgoingDirective]) -> None:
        self.pushed += [one.seq for one in directives]

    def dismiss(self) -> None:
        self.dismissed = True


def test_outbox_session_receives_backlog_then_new_directives() -> None:
    outbox, session = Outbox(0), Session()
    outbox.deliver([outgoing(outbox, "a")])
    assert [one.seq for one in outbox.attach("a", session)] == [1]
    outbox.deliver([outgoing(outbox, "a"), outgoing(outbox, "b"), outgoing(outbox, "a")])
    assert session.pushed == [2, 3]
    assert outbox.connected_count() == 1


def test_outbox_newest_session_replaces_previous() -> None:
    outbox, first, second = Outbox(0), Session(), Session()
    outbox.attach("a", first)
    outbox.attach("a", second)
    outbox.detach("a", first)
    outbox.deliver([outgoing(outbox, "a")])
    assert (first.dismissed, first.pushed, second.pushed) == (True, [], [1])
    outbox.detach("a", second)
    assert not outbox.has_receiver("a")


def test_outbox_dismisses_session_of_other_incarnation() -> None:
    outbox, session = Outbox(0), Session(incarnation=1)
    outbox.attach("a", session)
    outbox.dismiss("a", 1)
    assert not session.dismissed
    outbox.dismiss("a", 2)
    assert session.dismissed
    assert not outbox.has_receiver("a")


def test_outbox_close_dismisses_every_session() -> None:
    outbox, sessions = Outbox(0), [Session(), Session()]
    for node, session in zip("ab", sessions, strict=True):
        outbox.attach(node, session)
    outbox.close()
    assert [session.dismissed for session in sessions] == [True, True]


def test_outbox_acknowledgement_beyond_sent_is_clamped() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a")])
    outbox.acknowledge("a", 1000)
    assert outbox.take_acknowledged() == {"a": 1}
    outbox.deliver([outgoing(outbox, "a")])
    assert seqs(outbox, "a") == [2]


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
        assert [one.seq for one in outbox.attach(nodes[-2], newer)] == [1]
        await asyncio.sleep(0)
        assert sum(bool(session.pushed) for session in sessions.values()) == HINTS_PER_LOOP_ITERATION + 1
        while not all(sessions[node].pushed for node in nodes[:-2]):
            await asyncio.sleep(0)
        assert all(sessions[node].pushed == [1] for node in nodes[:-2])
        assert newer.pushed == []

    asyncio.run(scenario())
