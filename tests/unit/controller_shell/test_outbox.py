from __future__ import annotations

import asyncio

from controller.push import SPAN, Body, Outbox, Outgoing
from controller.store.records import OutboxRow


def outgoing(outbox: Outbox, node: str, body: str = "{}", *, topic: str = "") -> Outgoing:
    return Outgoing(node=node, seq=outbox.number(node), body=Body(body), durable=not topic, topic=topic)


def seqs(outbox: Outbox, node: str, after: int = 0) -> list[int]:
    return [one.seq for one in outbox.pending(node, after)]


def test_numbers_grow_across_lives_even_when_everything_was_acknowledged() -> None:
    first, second = Outbox(1), Outbox(2)
    assert [first.number("a"), first.number("a"), first.number("b")] == [SPAN + 1, SPAN + 2, SPAN + 1]
    assert second.number("a") == 2 * SPAN + 1


def test_stored_directives_come_before_new_ones() -> None:
    outbox = Outbox(2, [OutboxRow(node="a", seq=SPAN + 4, body="{}"), OutboxRow(node="a", seq=SPAN + 5, body="{}")])
    outbox.deliver([outgoing(outbox, "a")])
    assert seqs(outbox, "a") == [SPAN + 4, SPAN + 5, 2 * SPAN + 1]
    assert outbox.oldest("a") == SPAN + 4


def test_an_acknowledgement_is_cumulative_and_handed_on_once() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a") for _ in range(3)])
    outbox.acknowledge("a", 2)
    outbox.acknowledge("a", 1)
    assert seqs(outbox, "a") == [3]
    assert outbox.take_pruned() == {"a": 2}
    assert outbox.take_pruned() == {}


def test_a_newer_hint_of_the_same_topic_replaces_the_older() -> None:
    outbox = Outbox(0)
    outbox.deliver([outgoing(outbox, "a", topic="versions/j"), outgoing(outbox, "a")])
    outbox.deliver([outgoing(outbox, "a", topic="versions/j"), outgoing(outbox, "a", topic="versions/k")])
    assert seqs(outbox, "a") == [2, 3, 4]


def test_a_waiter_is_woken_by_its_own_node_only() -> None:
    async def scenario() -> tuple[bool, bool, int]:
        outbox = Outbox(0)
        a, b = outbox.wait("a"), outbox.wait("b")
        connected = outbox.connected()
        outbox.deliver([outgoing(outbox, "a")])
        woken = a.done(), b.done()
        outbox.leave("a", a)
        outbox.leave("b", b)
        assert not outbox.waiting("a")
        return *woken, connected

    assert asyncio.run(scenario()) == (True, False, 2)


def test_closing_ends_every_wait_now_and_later() -> None:
    async def scenario() -> list[bool]:
        outbox = Outbox(0)
        before = outbox.wait("a")
        outbox.close()
        return [before.done(), outbox.wait("a").done()]

    assert asyncio.run(scenario()) == [True, True]
