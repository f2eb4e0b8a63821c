"""Bound what people and programs may have under way, and what of the event loop's time their answers take.

Agents' beats and reports are handled by the same event loop, as they come. A request of anybody else is cut into
*slices*, each of which is a few milliseconds of work. One slice runs in a turn of the loop, identities take turns, and
after each the loop is left to agents for as long as the slice took (at the default share).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import RateLimited

RETRY_AFTER_S = 1.0
"""What a refused request is told to wait: by then most of those before it have been answered."""

LIMITS = ("in_flight", "bytes")
"""For which a request may be refused."""

IdentityKey = tuple[str, str]
"""Role and subject."""


def identity_key(identity: Identity) -> IdentityKey:
    """As whom an identity is counted: all its tokens and certificates are one."""
    return identity.role, identity.subject


class AdmissionControl:
    """Every request under way that is not an agent's. For the event loop's thread only.

    Args:
        most: requests of one identity that may be under way: waiting, being worked on, or being sent.
        most_bytes: bytes of answers to one identity that may wait for it to take them.
        share: of the event loop's time that answers may take, in (0, 1].
        monotonic: the clock, seconds.
        refused: told one of LIMITS for each request that is refused for it.

    Attributes:
        held_bytes: bytes of all answers that are being sent.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        loop_share: float,
        monotonic: Callable[[], float],
        on_refused: Callable[[str], None] = lambda limit: None,
    ) -> None:
        self._most = max_requests
        self._most_bytes = max_bytes
        self._refused = on_refused
        self._open: dict[IdentityKey, list[RequestReservation]] = {}
        self._turns = _SliceScheduler(loop_share, monotonic)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def buffered_bytes(self) -> int:
        return sum(place.bytes for places in self._open.values() for place in places)

    def reserve(self, identity: Identity) -> RequestReservation:
        """A place for one request, which must be left. Raises RateLimited where the identity has too many.

        Nodes that join are not counted: one token may be shared by a whole rack.
        """
        who = identity_key(identity)
        places = self._open.get(who, [])
        if len(places) >= self._most and identity.role is not TokenRole.JOIN:
            self._refused("in_flight")
            raise RateLimited(
                f"{identity.role} {identity.subject} has {len(places)} requests under way, as many as one may: come "
                "again when some are answered, or take another token",
                RETRY_AFTER_S,
            )
        place = RequestReservation(self, who)
        self._open.setdefault(who, places).append(place)
        return place

    async def wait_for_slice(self, who: IdentityKey) -> None:
        """Waits until a slice of this identity's may run; the slice ends with the caller's next await."""
        await self._turns.take(who)

    def add_bytes(self, place: RequestReservation, size: int) -> None:
        """Counts an answer that is to be sent. Raises RateLimited where too much is unsent already."""
        others = sum(one.bytes for one in self._open[place.identity_key])
        if others and others + size > self._most_bytes:
            self._refused("bytes")
            role, subject = place.identity_key
            raise RateLimited(
                f"{others} bytes of answers wait for {role} {subject} to take them, and this one has {size}: read "
                "those first, or ask for less at a time",
                RETRY_AFTER_S,
            )
        place.bytes = size

    def release(self, place: RequestReservation) -> None:
        places = self._open[place.identity_key]
        places.remove(place)
        if not places:
            del self._open[place.identity_key]


class RequestReservation:
    """One request's, from its admission until its answer is sent."""

    __slots__ = ("_admission", "bytes", "identity_key")

    def __init__(self, admission: AdmissionControl, identity_key: IdentityKey) -> None:
        self._admission = admission
        self.identity_key = identity_key
        self.bytes = 0

    async def wait_for_slice(self) -> None:
        """Waits until the next slice may run."""
        await self._admission.wait_for_slice(self.identity_key)

    def add_bytes(self, size: int) -> None:
        """So many bytes of the answer are about to be sent. Raises RateLimited."""
        self._admission.add_bytes(self, size)

    def release(self) -> None:
        """The answer is sent, or there is none."""
        self._admission.release(self)


class _SliceScheduler:
    """Lets one waiting slice run in a turn of the event loop, of each identity after the other."""

    def __init__(self, share: float, monotonic: Callable[[], float]) -> None:
        self._rest = 1.0 / share - 1.0
        self._monotonic = monotonic
        self._waiting: dict[IdentityKey, deque[asyncio.Future[None]]] = {}
        self._due = False
        self._began = self._free_at = 0.0

    async def take(self, who: IdentityKey) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(waiting)
        self._schedule()
        await waiting

    def _schedule(self) -> None:
        if self._due or not self._waiting:
            return
        self._due = True
        loop, wait_s = asyncio.get_running_loop(), self._free_at - self._monotonic()
        if wait_s > 0:
            loop.call_later(wait_s, self._grant)
        else:
            loop.call_soon(self._grant)

    def _grant(self) -> None:
        waiting = self._next()
        if waiting is None:
            self._due = False
            return
        waiting.set_result(None)  # the slice is the next thing that the loop calls, and then
        asyncio.get_running_loop().call_soon(self._ended)
        self._began = self._monotonic()

    def _next(self) -> asyncio.Future[None] | None:
        """The longest waiting one of the identity whose turn it is; the identity then goes to the end."""
        while self._waiting:
            who = next(iter(self._waiting))
            queue = self._waiting.pop(who)
            first = queue.popleft()
            if queue:
                self._waiting[who] = queue
            if not first.done():  # its client has not gone
                return first
        return None

    def _ended(self) -> None:
        now = self._monotonic()
        self._free_at = max(now, self._free_at) + (now - self._began) * self._rest
        self._due = False
        self._schedule()
