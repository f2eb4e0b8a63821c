"""Which controller to try next, and from when on. No sockets, no clocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.backoff import Backoff

SETTLED_AFTER_S = 1.0
"""A session that lasted so long and ended is sought again at once; a shorter one counts as a failure."""

HUNG_PAUSE_S = 2.0
"""Before an address that took a connection and said nothing costs its time-out again, where there are others."""


class _Address(msgspec.Struct):
    url: str
    not_before: float = 0.0
    failures: int = 0
    hung: int = 0


class Controllers:
    """The controllers' addresses. Times are monotonic seconds.

    After an end the others are tried at once, one after another; each address that fails has a back-off of its own.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("no controller address")
        self._addresses = [_Address(url.rstrip("/")) for url in urls]
        self._first = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def next(self, now: float) -> tuple[str, float]:
        """The address to try next, and from when on: of those that may be tried now the one whose turn it is."""
        turn = self._addresses[self._first :] + self._addresses[: self._first]
        chosen = min(turn, key=lambda address: max(address.not_before, now))  # the first of equals
        return chosen.url, chosen.not_before

    def patience_s(self, url: str, floor_s: float, ceiling_s: float) -> float:
        """How long to wait for a session with ``url``: twice as long after each time that it hung.

        A controller that a whole fleet calls at once must come to answer somebody.
        """
        return max(floor_s, Backoff(floor_s, ceiling_s).limit_s(self._at(url)[1].hung))

    def left(self, url: str) -> None:
        """We hung up, and come back."""
        self._first, address = self._at(url)
        address.failures = address.hung = 0

    def ended(self, url: str, now: float, lasted_s: float, backoff: Backoff, uniform: float) -> None:
        """A session ended: the others come first."""
        address = self._at(url)[1]
        address.hung = 0
        if lasted_s >= SETTLED_AFTER_S:
            address.failures = 0
            self._pass_over(url, now)
        else:
            self.failed(url, now, backoff, uniform)

    def failed(self, url: str, now: float, backoff: Backoff, uniform: float, at_least_s: float = 0.0) -> None:
        """No session came of it: not again before the back-off, nor before ``at_least_s``."""
        address = self._at(url)[1]
        pause_s = max(backoff.delay_s(address.failures, uniform), at_least_s)
        address.failures += 1
        self._pass_over(url, now + pause_s)

    def hung(self, url: str, now: float, backoff: Backoff, uniform: float) -> None:
        """It did not answer in time, and may do so again: the others come first for a while."""
        self._at(url)[1].hung += 1
        self.failed(url, now, backoff, uniform, HUNG_PAUSE_S if len(self) > 1 else 0.0)

    def _pass_over(self, url: str, not_before: float) -> None:
        index, address = self._at(url)
        address.not_before = not_before
        self._first = (index + 1) % len(self)

    def _at(self, url: str) -> tuple[int, _Address]:
        return next((i, address) for i, address in enumerate(self._addresses) if address.url == url)
