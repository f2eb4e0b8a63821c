"""Directives on their way to nodes: what is committed, not yet acknowledged, and who is there to take it.

Everything here mirrors committed rows of the outbox table; nothing is offered before its transaction is durable.
Runs in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from everstep_controller.store.rows import OutboxRow

SEQ_PER_EPOCH = 1_000_000_000
"""Directives a node may be sent in one life of a controller: at a hundred a second, four months without a pause."""
HINTS_PER_TURN = 64
"""Nodes that are sent a hint before the next beats are read: together they take about a millisecond."""
DEFLATE_MIN_BYTES = 16 << 10
"""Bodies from here on are deflated: a generation of 10,000 ranks shrinks from half a megabyte to a fifteenth, and goes
to 1,250 nodes."""


class EncodedBody:
    """A directive's body in JSON: encoded once, and deflated once, for all nodes that it goes to.

    Args:
        text: the JSON.
        stored: what stands for it in the outbox table; the text itself where nothing shorter does.
    """

    __slots__ = ("_deflated", "json", "stored", "text")

    def __init__(self, text: str, stored: str = "") -> None:
        self.text = text
        self.stored = stored or text
        self.json = text.encode()
        self._deflated: bytes | None = None

    @property
    def is_large(self) -> bool:
        return len(self.json) >= DEFLATE_MIN_BYTES

    @property
    def deflated(self) -> bytes:
        """The JSON as RFC 1950 deflates it; level 1, for the first receiver waits for it."""
        if self._deflated is None:
            self._deflated = zlib.compress(self.json, 1)
        return self._deflated


class EncodedDirective(msgspec.Struct, frozen=True):
    """``Directive`` over an encoded body."""

    seq: int
    body: msgspec.Raw


class OutgoingDirective(msgspec.Struct, frozen=True, kw_only=True):
    """A directive for a node.

    ``durable``: stored until acknowledged. ``topic``: a newer one of the same topic makes this one pointless, if it
    ``replaces`` others. ``final``: whoever has heard it does not come back, so it is not said from memory.
    """

    node: str
    seq: int
    body: EncodedBody
    is_durable: bool = True
    topic: str = ""
    replaces_older: bool = True
    is_final: bool = False

    def encode(self) -> EncodedDirective:
        """For an answer that carries it."""
        return EncodedDirective(self.seq, msgspec.Raw(self.body.json))


def generation_topic(job: str) -> str:
    """A node that is away needs the newest generation of a job only: it is not sent all those that it has missed."""
    return f"generation/{job}"


class _Job(msgspec.Struct):
    job: str


class _NewGeneration(msgspec.Struct, tag="NewGeneration"):
    """What is read of a stored generation."""

    spec: _Job


def _stored_topic(text: str) -> str:
    try:
        return generation_topic(msgspec.json.decode(text, type=_NewGeneration).spec.job)
    except msgspec.ValidationError:
        return ""


class DirectiveReceiver(Protocol):
    """A node's session. ``incarnation``: the life of the node that it belongs to."""

    @property
    def incarnation(self) -> int: ...

    def push(self, directives: Sequence[OutgoingDirective]) -> None:
        """Sends what was just committed, in order. Never raises and never waits."""

    def dismiss(self) -> None:
        """Ends the session: another one, or another life of the node, took its place."""


class Outbox:
    """Every node's queue of directives, and the sessions that take them.

    Args:
        epoch: which life of a controller this is. Numbers begin at ``epoch * SPAN``, so they grow across lives
            without being stored, whatever was acknowledged and deleted meanwhile.
        rows: what was stored and not acknowledged.
    """

    def __init__(self, epoch: int, rows: Iterable[OutboxRow] = ()) -> None:
        self._first = epoch * SEQ_PER_EPOCH
        self._newest: dict[str, int] = {}
        self._queues: dict[str, deque[OutgoingDirective]] = defaultdict(deque)
        self._receivers: dict[str, DirectiveReceiver] = {}
        self._later: dict[str, list[OutgoingDirective]] = {}
        self._pruned: dict[str, int] = {}
        self._dropped: list[tuple[str, int]] = []
        self.closed = False
        bodies: dict[str, tuple[EncodedBody, str]] = {}
        for row in rows:
            if row.body not in bodies:
                bodies[row.body] = (EncodedBody(row.body), _stored_topic(row.body))
            body, topic = bodies[row.body]
            self._queues[row.node].append(OutgoingDirective(node=row.node, seq=row.seq, body=body, topic=topic))

    def take_seq(self, node: str) -> int:
        """Takes the node's next number."""
        self._newest[node] = self.next_seq(node)
        return self._newest[node]

    def next_seq(self, node: str) -> int:
        """The number that the node's next directive will get."""
        return self._newest.get(node, self._first) + 1

    def oldest_seq(self, node: str) -> int:
        """The number of the first directive that the node has not acknowledged, or of the next one to come."""
        queue = self._queues.get(node)
        return queue[0].seq if queue else self.next_seq(node)

    def deliver(self, outgoing: Iterable[OutgoingDirective]) -> None:
        """Queues what is committed (in order of its numbers per node) and hands it to whoever is there for it."""
        fresh: dict[str, list[OutgoingDirective]] = {}
        for one in outgoing:
            if one.topic and one.replaces_older:
                self._drop(one.node, one.topic)
            self._queues[one.node].append(one)
            fresh.setdefault(one.node, []).append(one)
        hints = len(fresh) > HINTS_PER_TURN
        for node, directives in fresh.items():
            if hints and not directives[-1].is_durable and len(directives) == 1:
                self._defer_hint(node, directives[0])
            else:
                self._push(node, directives)

    def _push(self, node: str, directives: list[OutgoingDirective]) -> None:
        before = self._later.pop(node, None)
        receiver = self._receivers.get(node)
        if receiver is not None:
            receiver.push(directives if before is None else [*before, *directives])

    def _defer_hint(self, node: str, hint: OutgoingDirective) -> None:
        """A hint to a whole job can wait while beats are answered; whatever else comes for the node brings it along."""
        if not self._later:
            asyncio.get_running_loop().call_soon(self._push_some)
        self._later.setdefault(node, []).append(hint)

    def _push_some(self) -> None:
        for node in list(itertools.islice(self._later, HINTS_PER_TURN)):
            self._push(node, [])
        if self._later:
            asyncio.get_running_loop().call_soon(self._push_some)

    def attach(self, node: str, receiver: DirectiveReceiver) -> tuple[OutgoingDirective, ...]:
        """From now on ``receiver`` is handed the node's directives, and whoever was is dismissed. Returns those that
        wait already."""
        self._later.pop(node, None)
        before = self._receivers.get(node)
        self._receivers[node] = receiver
        if before is not None and before is not receiver:
            before.dismiss()
        return self.pending(node)

    def detach(self, node: str, receiver: DirectiveReceiver) -> None:
        """Ends that, if it is still ``receiver`` that takes them."""
        if self._receivers.get(node) is receiver:
            del self._receivers[node]

    def dismiss(self, node: str, incarnation: int) -> None:
        """The node lives as ``incarnation`` from now on: who takes directives for another life of it is dismissed."""
        receiver = self._receivers.get(node)
        if receiver is not None and receiver.incarnation != incarnation:
            del self._receivers[node]
            receiver.dismiss()

    def has_receiver(self, node: str) -> bool:
        """Whether the node has a session."""
        return node in self._receivers

    def _drop(self, node: str, topic: str) -> None:
        queue = self._queues[node]
        if any(one.topic == topic for one in queue):
            self._dropped += [(node, one.seq) for one in queue if one.topic == topic and one.is_durable]
            self._queues[node] = deque(one for one in queue if one.topic != topic)

    def acknowledge(self, node: str, through: int) -> None:
        """The node has every directive up to ``through``; the next transaction deletes their rows."""
        queue = self._queues.get(node)
        if not queue or queue[0].seq > through:
            return
        through = min(through, queue[-1].seq)
        while queue and queue[0].seq <= through:
            queue.popleft()
        if not queue:
            del self._queues[node]
        self._pruned[node] = through

    def forget(self, node: str) -> None:
        """Nothing waits for the node any more. Its numbers go on: its agent may be back under the same name."""
        self._queues.pop(node, None)
        self._later.pop(node, None)
        self._pruned.pop(node, None)
        self._dropped = [place for place in self._dropped if place[0] != node]

    def take_acknowledged(self) -> dict[str, int]:
        """What was acknowledged since the last call: node to number."""
        pruned, self._pruned = self._pruned, {}
        return pruned

    def take_superseded(self) -> list[tuple[str, int]]:
        """Stored directives that newer ones made pointless since the last call: nodes and numbers."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def pending(self, node: str, after: int = 0) -> tuple[OutgoingDirective, ...]:
        """What the node has not acknowledged, beyond ``after``, in order."""
        return tuple(one for one in self._queues.get(node, ()) if one.seq > after)

    def pending_count(self, node: str) -> int:
        """Directives the node has not acknowledged."""
        return len(self._queues.get(node, ()))

    def total_pending(self) -> int:
        """Directives that no node has acknowledged yet, of all nodes."""
        return sum(len(queue) for queue in self._queues.values())

    def connected_count(self) -> int:
        """Nodes with a session."""
        return len(self._receivers)

    def close(self) -> None:
        """Ends every session: the controller is going."""
        self.closed = True
        for receiver in list(self._receivers.values()):
            receiver.dismiss()
