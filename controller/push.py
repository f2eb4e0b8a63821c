"""Directives on their way to nodes: what is committed, not yet acknowledged, and who waits for it.

Everything here mirrors committed rows of the outbox table; nothing is offered before its transaction is durable.
Runs in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable

import msgspec

from controller.store.records import OutboxRow

SPAN = 1_000_000_000
"""Directives a node may be sent in one life of a controller: at a hundred a second, four months without a pause."""


class Encoded(msgspec.Struct, frozen=True):
    """``Directive`` with its body as it lies in the outbox: encoded once, sent to any number of nodes."""

    seq: int
    body: msgspec.Raw


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A directive for a node. ``body`` is JSON.

    ``durable``: stored until acknowledged. ``topic``: a newer one of the same topic makes this one pointless.
    """

    node: str
    seq: int
    body: str
    durable: bool = True
    topic: str = ""


class Outbox:
    """Every node's queue of directives, and the long polls that wait on them.

    Args:
        epoch: which life of a controller this is. Numbers begin at ``epoch * SPAN``, so they grow across lives
            without being stored, whatever was acknowledged and deleted meanwhile.
        rows: what was stored and not acknowledged.
    """

    def __init__(self, epoch: int, rows: Iterable[OutboxRow] = ()) -> None:
        self._first = epoch * SPAN
        self._newest: dict[str, int] = {}
        self._queues: dict[str, deque[Outgoing]] = defaultdict(deque)
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._pruned: dict[str, int] = {}
        self.closed = False
        self.deliver(Outgoing(node=row.node, seq=row.seq, body=row.body) for row in rows)

    def number(self, node: str) -> int:
        """Takes the node's next number."""
        self._newest[node] = self.next_number(node)
        return self._newest[node]

    def next_number(self, node: str) -> int:
        """The number that the node's next directive will get."""
        return self._newest.get(node, self._first) + 1

    def oldest(self, node: str) -> int:
        """The number of the first directive that the node has not acknowledged, or of the next one to come."""
        queue = self._queues.get(node)
        return queue[0].seq if queue else self.next_number(node)

    def deliver(self, outgoing: Iterable[Outgoing]) -> None:
        """Queues what is committed (in order of its numbers per node) and wakes whoever waits for it."""
        touched: set[str] = set()
        for one in outgoing:
            if one.topic:
                self._drop(one.node, one.topic)
            self._queues[one.node].append(one)
            touched.add(one.node)
        for node in touched:
            self.wake(node)

    def _drop(self, node: str, topic: str) -> None:
        queue = self._queues[node]
        if any(one.topic == topic for one in queue):
            self._queues[node] = deque(one for one in queue if one.topic != topic)

    def acknowledge(self, node: str, through: int) -> None:
        """The node has every directive up to ``through``; the next transaction deletes their rows."""
        queue = self._queues.get(node)
        if not queue or queue[0].seq > through:
            return
        while queue and queue[0].seq <= through:
            queue.popleft()
        self._pruned[node] = through

    def take_pruned(self) -> dict[str, int]:
        """What was acknowledged since the last call: node to number."""
        pruned, self._pruned = self._pruned, {}
        return pruned

    def has_any(self, node: str, after: int) -> bool:
        """Whether there is something beyond ``after``."""
        queue = self._queues.get(node)
        return queue is not None and len(queue) > 0 and queue[-1].seq > after

    def pending(self, node: str, after: int = 0) -> tuple[Encoded, ...]:
        """What the node has not acknowledged, beyond ``after``, in order."""
        queue = self._queues.get(node, ())
        return tuple(Encoded(one.seq, msgspec.Raw(one.body.encode())) for one in queue if one.seq > after)

    def depth(self, node: str) -> int:
        """Directives the node has not acknowledged."""
        return len(self._queues.get(node, ()))

    def total(self) -> int:
        """Directives that no node has acknowledged yet, of all nodes."""
        return sum(len(queue) for queue in self._queues.values())

    def waiting(self, node: str) -> bool:
        """Whether a long poll of the node is held."""
        return bool(self._waiting.get(node))

    def connected(self) -> int:
        """Nodes with a long poll held."""
        return sum(1 for waiters in self._waiting.values() if waiters)

    def wait(self, node: str) -> asyncio.Future[None]:
        """A future that is done when something comes for the node, or this outbox closes. Give it to ``leave``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_result(None)
        self._waiting[node].add(future)
        return future

    def leave(self, node: str, future: asyncio.Future[None]) -> None:
        """Ends a wait."""
        self._waiting[node].discard(future)
        if not self._waiting[node]:
            del self._waiting[node]

    def close(self) -> None:
        """Ends every wait, now and from now on: the controller is going."""
        self.closed = True
        for node in list(self._waiting):
            self.wake(node)

    def wake(self, node: str) -> None:
        """Ends the waits of the node's long polls."""
        for future in self._waiting.get(node, ()):
            if not future.done():
                future.set_result(None)
