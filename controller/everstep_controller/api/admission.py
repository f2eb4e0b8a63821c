"""Limit concurrent requests of people and programs, and the share of the event loop's time that their responses take.

Agents' heartbeats and reports use the same event loop. Every other request is cut into *slices* of a few milliseconds.
One slice runs per turn of the loop, and identities alternate. After each slice the loop is left to agents for as long
as the slice took (at the default share).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from everstep.bearer_tokens import Identity, TokenRole
from everstep.errors import RateLimited

RETRY_AFTER_S = 1.0
"""Seconds that a refused client should wait: most earlier requests are answered by then."""

LIMITS = ("in_flight", "bytes")
"""Limits for which a request may be refused."""

IdentityKey = tuple[str, str]
"""Role and subject; of a request without a known token, STRANGER and the sender's network."""

STRANGER = ""


def identity_key(identity: Identity) -> IdentityKey:
    """Return the key under which an identity is counted: all its tokens and certificates share one."""
    return identity.role, identity.subject


@dataclass(eq=False, kw_only=True)
class AdmissionControl:
    """Admits requests that are not agents'. For the event loop's thread only."""

    max_requests: int  # requests of one identity that may wait, run, or be sent at the same time
    max_bytes: int  # bytes of responses to one identity that may be unsent
    loop_share: float  # share of the event loop's time that responses may take, in (0, 1]
    monotonic: Callable[[], float]  # clock in seconds
    on_refused: Callable[[str], None] = lambda limit: None  # called with one of LIMITS for each refused request

    def __post_init__(self) -> None:
        self.open: dict[IdentityKey, list[RequestReservation]] = {}
        self.slices = SliceScheduler(self.loop_share, self.monotonic)

    def __len__(self) -> int:
        return sum(map(len, self.open.values()))

    @property
    def buffered_bytes(self) -> int:
        """Bytes of all responses that are being sent."""
        return sum(place.bytes for places in self.open.values() for place in places)

    def reserve(self, identity: Identity) -> RequestReservation:
        """Reserve a place for one request; the caller must release it. Raises RateLimited for too many."""
        who = identity_key(identity)
        places = self.open.get(who, [])
        if len(places) >= self.max_requests and identity.role is not TokenRole.JOIN:  # a rack may share it
            self.on_refused("in_flight")
            raise RateLimited(
                f"{identity.role} {identity.subject} has {len(places)} requests in progress, the most allowed: wait "
                "for answers, or use another token",
                RETRY_AFTER_S,
            )
        place = RequestReservation(self, who)
        self.open.setdefault(who, places).append(place)
        return place


@dataclass(eq=False, slots=True)
class RequestReservation:
    """One request's reservation, from its admission until its response is sent."""

    admission: AdmissionControl
    identity_key: IdentityKey
    bytes: int = 0

    async def wait_for_slice(self) -> None:
        """Wait until the next slice may run."""
        await self.admission.slices.take(self.identity_key)

    def add_bytes(self, size: int) -> None:
        """Count ``size`` bytes of the response before they are sent. Raises RateLimited if too much is unsent."""
        others = sum(response.bytes for response in self.admission.open[self.identity_key])
        if others and others + size > self.admission.max_bytes:
            self.admission.on_refused("bytes")
            role, subject = self.identity_key
            raise RateLimited(
                f"{others} bytes of answers wait to be read by {role} {subject}, and this one has {size}: read those "
                "first, or request less at a time",
                RETRY_AFTER_S,
            )
        self.bytes = size

    def release(self) -> None:
        """End the reservation: the response is sent, or there is none."""
        places = self.admission.open[self.identity_key]
        places.remove(self)
        if not places:
            del self.admission.open[self.identity_key]


class SliceScheduler:
    """Run one waiting slice per turn of the event loop, with identities alternating."""

    def __init__(self, share: float, monotonic: Callable[[], float]) -> None:
        self._rest = 1.0 / share - 1.0
        self._monotonic = monotonic
        self._waiting: dict[IdentityKey, deque[asyncio.Future[None]]] = {}
        self._due = False
        self._began = self._free_at = 0.0

    async def take(self, identity_key: IdentityKey) -> None:
        """Wait until a slice of this identity may run; the slice ends with the caller's next await."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(identity_key, deque()).append(waiting)
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
        waiting.set_result(None)  # the slice runs next in the event loop, and then the callback below
        asyncio.get_running_loop().call_soon(self._on_slice_ended)
        self._began = self._monotonic()

    def _next(self) -> asyncio.Future[None] | None:
        """Return the longest waiting slice of the next identity, and move the identity to the end."""
        while self._waiting:
            who = next(iter(self._waiting))
            queue = self._waiting.pop(who)
            first = queue.popleft()
            if queue:
                self._waiting[who] = queue
            if not first.done():  # its client is still connected
                return first
        return None

    def _on_slice_ended(self) -> None:
        now = self._monotonic()
        self._free_at = max(now, self._free_at) + (now - self._began) * self._rest
        self._due = False
        self._schedule()
