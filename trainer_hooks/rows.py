"""Copies of bytes in columns: a million tensors are three arrays, not a million objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Column = np.ndarray


class Rows(NamedTuple):
    """Copies in ascending order of ``source`` (byte offsets): ``length`` bytes each, to the address ``target``."""

    source: Column
    target: Column
    length: Column

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def cut(self, every: int) -> Rows:
        """The same copies, none across a multiple of ``every`` bytes of the source."""
        first, last = self.source // every, (self.source + self.length - 1) // every
        count = last - first + 1
        which = np.repeat(np.arange(len(count)), count)
        block = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
        start = np.maximum(self.source[which], block * every)
        end = np.minimum(self.source[which] + self.length[which], (block + 1) * every)
        cut = Rows(start, self.target[which] + start - self.source[which], end - start)
        if np.any(start[1:] < start[:-1]):  # pieces of two copies of the same bytes
            order = np.argsort(start, kind="stable")
            cut = Rows(*(column[order] for column in cut))
        return cut


NOTHING = Rows(*(np.zeros(0, np.int64) for _ in range(3)))
