"""Digests of byte ranges that pass by one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import xxhash


class RangeHasher:
    """xxh3-128 of each range, fed with the ranges' bytes one after another while they are still in the cache.

    Args:
        lengths: of the ranges, bytes.
        known: the digest of each, where it is known already; the bytes of that range are not looked at. Empty: of none.
    """

    def __init__(self, lengths: Sequence[int], known: Sequence[bytes | None] = ()) -> None:
        self._left = deque(lengths)
        self._known = deque(known or [None] * len(lengths))
        self._digests: list[bytes] = []
        self._hash = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        while view:
            self._close_finished()
            part = view[: self._left[0]]
            if self._known[0] is None:
                self._hash.update(part)
            self._left[0] -= len(part)
            view = view[len(part) :]

    def _close_finished(self) -> None:
        while self._left and not self._left[0]:
            self._left.popleft()
            known = self._known.popleft()
            if known is not None:
                self._digests.append(known)
                continue
            self._digests.append(self._hash.digest())
            self._hash = xxhash.xxh3_128()

    def digests(self) -> bytes:
        """All digests, one after another. To be asked once everything was fed."""
        self._close_finished()
        return b"".join(self._digests)
