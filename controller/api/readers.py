"""Who reads the event stream: how many at once, and how much waits for them."""

from __future__ import annotations

from collections import Counter

from everstep.errors import RateLimited
from everstep.tokens import Identity

MOST_OF_ONE = 8
"""Streams of one identity: a wall of displays that share a token."""
MOST = 256
"""Streams of all. Each event is put into words for each of them; one that is stuck holds some 0.2 MiB."""
COME_AGAIN_S = 10.0
"""Seconds after which one that does not read has been cut off, and left its place."""


class Place:
    """One reader's place among the others, until it leaves."""

    def __init__(self, readers: Readers, identity: Identity) -> None:
        self._readers = readers
        self._identity = identity
        self._held = 0

    def hold(self, bytes_: int) -> None:
        """So much waits for the reader to take it."""
        self._readers.held_bytes += bytes_ - self._held
        self._held = bytes_

    def leave(self) -> None:
        """The stream is over."""
        self.hold(0)
        self._readers.let_go(self._identity)


class Readers:
    """Counts streams.

    Attributes:
        held_bytes: what was made for readers that have not taken it, beside the buffers of their sockets.
    """

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()
        self.held_bytes = 0

    def __len__(self) -> int:
        return self._open.total()

    def take_place(self, identity: Identity) -> Place:
        """A place, which must be left. Raises RateLimited where there is none."""
        who = (identity.role, identity.subject)
        if self._open.get(who, 0) >= MOST_OF_ONE:
            raise RateLimited(
                f"{identity.role} {identity.subject} reads {MOST_OF_ONE} event streams already, as many as one may: "
                "close one, or take another token",
                COME_AGAIN_S,
            )
        if len(self) >= MOST:
            raise RateLimited(
                f"{MOST} event streams are open already, as many as a controller serves: close some, or ask for "
                "/v1/events?after= now and then",
                COME_AGAIN_S,
            )
        self._open[who] += 1
        return Place(self, identity)

    def let_go(self, identity: Identity) -> None:
        """One of its streams is over."""
        who = (identity.role, identity.subject)
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]
