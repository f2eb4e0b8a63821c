"""Queue directives for nodes and push them to connected sessions until they are acknowledged.

The queues mirror committed rows of the outbox table; no directive is offered before its transaction is durable.
Everything runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import msgspec

from everstep_controller.store.rows import OutboxRow

SEQ_PER_EPOCH = 1_000_000_000
"""Directive numbers per node and epoch: enough for a hundred per second over four months."""
HINTS_PER_LOOP_ITERATION = 64
"""Nodes that are sent a hint before the next heartbeats are read: about a millisecond of work."""
DEFLATE_MIN_BYTES = 16 << 10
"""Bodies of at least this size are deflated: a generation of 10,000 ranks, half a megabyte, shrinks to a fifteenth."""


class EncodedBody:
    """A directive's JSON body, encoded and deflated once for all nodes; ``stored`` is its form in the outbox table."""

    def __init__(self, text: str, stored: str = "") -> None:
        self.text = text
        self.stored = stored or text
        self.json = text.encode()

    @property
    def is_large(self) -> bool:
        return len(self.json) >= DEFLATE_MIN_BYTES

    @cached_property
    def deflated(self) -> bytes:
        """The JSON in zlib format (RFC 1950), at level 1 because the first receiver waits for it."""
        return zlib.compress(self.json, 1)


class EncodedDirective(msgspec.Struct, frozen=True):
    """``Directive`` with an encoded body."""

    seq: int
    body: msgspec.Raw


class OutgoingDirective(msgspec.Struct, frozen=True, kw_only=True):
    """A directive for a node."""

    node: str
    seq: int
    body: EncodedBody
    is_durable: bool = True  # stored until acknowledged
    topic: str = ""  # shared by directives of which only the newest matters
    replaces_older: bool = True  # drop queued directives of the same topic
    is_final: bool = False  # irreversible at the receiver, so sent only once durable

    def encode(self) -> EncodedDirective:
        """Return the directive in the form that answers carry."""
        return EncodedDirective(self.seq, msgspec.Raw(self.body.json))


def generation_topic(job: str) -> str:
    """Return the topic of a job's generations: a node that was away needs only the newest."""
    return f"generation/{job}"


class _Job(msgspec.Struct):
    job: str


class _StoredGeneration(msgspec.Struct, tag="NewGeneration"):
    """The part that is read of a stored generation."""

    spec: _Job


def _stored_topic(text: str) -> str:
    try:
        return generation_topic(msgspec.json.decode(text, type=_StoredGeneration).spec.job)
    except msgspec.ValidationError:
        return ""


class DirectiveReceiver(Protocol):
    """A node's session, for one incarnation of the node."""

    @property
    def incarnation(self) -> int: ...

    def push(self, directives: Sequence[OutgoingDirective]) -> None:
        """Send committed directives, in order. Never raises and never waits."""

    def dismiss(self) -> None:
        """End the session: another session or incarnation replaced it."""


class Outbox:
    """Every node's queue of directives, and the sessions that receive them.

    Numbers begin at ``epoch * SEQ_PER_EPOCH``, so they grow across controllers without being stored. ``rows`` are
    stored directives that were not acknowledged.
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
        """Take the node's next number."""
        self._newest[node] = self.next_seq(node)
        return self._newest[node]

    def next_seq(self, node: str) -> int:
        """Return the number of the node's next directive."""
        return self._newest.get(node, self._first) + 1

    def oldest_seq(self, node: str) -> int:
        """Return the number of the node's first unacknowledged directive, or of its next one."""
        queue = self._queues.get(node)
        return queue[0].seq if queue else self.next_seq(node)

    def deliver(self, outgoing: Iterable[OutgoingDirective]) -> None:
        """Queue committed directives (per node in order of their numbers) and push them to connected sessions."""
        fresh: dict[str, list[OutgoingDirective]] = {}
        for directive in outgoing:
            if directive.topic and directive.replaces_older:
                self._drop(directive.node, directive.topic)
            self._queues[directive.node].append(directive)
            fresh.setdefault(directive.node, []).append(directive)
        hints = len(fresh) > HINTS_PER_LOOP_ITERATION
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
        """Delay a hint to a whole job while heartbeats are answered. Any other directive takes the hint along."""
        if not self._later:
            asyncio.get_running_loop().call_soon(self._push_some)
        self._later.setdefault(node, []).append(hint)

    def _push_some(self) -> None:
        for node in list(itertools.islice(self._later, HINTS_PER_LOOP_ITERATION)):
            self._push(node, [])
        if self._later:
            asyncio.get_running_loop().call_soon(self._push_some)

    def attach(self, node: str, receiver: DirectiveReceiver) -> tuple[OutgoingDirective, ...]:
        """Make ``receiver`` the node's session, dismiss the previous one, and return the directives that wait."""
        self._later.pop(node, None)
        before = self._receivers.get(node)
        self._receivers[node] = receiver
        if before is not None and before is not receiver:
            before.dismiss()
        return self.pending(node)

    def detach(self, node: str, receiver: DirectiveReceiver) -> None:
        """Detach ``receiver`` if it is still the node's session."""
        if self._receivers.get(node) is receiver:
            del self._receivers[node]

    def dismiss(self, node: str, incarnation: int) -> None:
        """Dismiss the node's session if it belongs to another incarnation than ``incarnation``."""
        receiver = self._receivers.get(node)
        if receiver is not None and receiver.incarnation != incarnation:
            del self._receivers[node]
            receiver.dismiss()

    def has_receiver(self, node: str) -> bool:
        """Return whether the node has a session."""
        return node in self._receivers

    def _drop(self, node: str, topic: str) -> None:
        queue = self._queues[node]
        if any(directive.topic == topic for directive in queue):
            self._dropped += [
                (node, directive.seq) for directive in queue if directive.topic == topic and directive.is_durable
            ]
            self._queues[node] = deque(directive for directive in queue if directive.topic != topic)

    def acknowledge(self, node: str, through: int) -> None:
        """Record that the node has every directive up to ``through``; the next transaction deletes their rows."""
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
        """Drop the node's queue. Its numbers continue, because its agent may return under the same name."""
        self._queues.pop(node, None)
        self._later.pop(node, None)
        self._pruned.pop(node, None)
        self._dropped = [place for place in self._dropped if place[0] != node]

    def take_acknowledged(self) -> dict[str, int]:
        """Return acknowledgements since the last call: node to number."""
        pruned, self._pruned = self._pruned, {}
        return pruned

    def take_superseded(self) -> list[tuple[str, int]]:
        """Return stored directives that newer ones replaced since the last call: nodes and numbers."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def pending(self, node: str, after: int = 0) -> tuple[OutgoingDirective, ...]:
        """Return the node's unacknowledged directives beyond ``after``, in order."""
        return tuple(directive for directive in self._queues.get(node, ()) if directive.seq > after)

    def pending_count(self, node: str) -> int:
        """Return the number of the node's unacknowledged directives."""
        return len(self._queues.get(node, ()))

    def total_pending(self) -> int:
        """Return the number of unacknowledged directives of all nodes."""
        return sum(len(queue) for queue in self._queues.values())

    def connected_count(self) -> int:
        """Return the number of nodes with a session."""
        return len(self._receivers)

    def close(self) -> None:
        """End every session: the controller stops."""
        self.closed = True
        for receiver in list(self._receivers.values()):
            receiver.dismiss()
