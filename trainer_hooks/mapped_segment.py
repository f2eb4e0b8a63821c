"""A segment file in a rank's own memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from everstep.slots import SegmentView


class MappedSegment:
    """A segment file mapped writable into this process. The mapping lives as long as this object or a view of it.

    ``descriptor``: of the file, open as long as this object lives; ``address``: of the mapping's first byte.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        self._map = mmap.mmap(self.descriptor, 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.identity = (status.st_dev, status.st_ino)
        self.buffer = memoryview(self._map)
        self.view = SegmentView(self.buffer)
        self.slot_bytes = self.view.slot_bytes
        self.page_locked = False

    @property
    def directory(self) -> str:
        """Where scratch files that the vault may write to go."""
        return os.path.dirname(self.path)

    def is_named(self) -> bool:
        """Whether the path still names the file that is mapped (a restarted vault may have made another)."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self.identity
