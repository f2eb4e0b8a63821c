"""Files that ranks name for bytes to land in: only plain files below the segment directory, and never a segment."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath

from agent.vault.memory import Budget, allocate
from everstep.errors import OutOfSlotMemory, PermissionDenied

MOST_VECTORS = 512
"""Views written by one system call; Linux takes 1,024."""

_SEGMENT_NAMES = ("own-", "replica-", "parity-", ".")


class Scratch:
    """An open landing file. Made, with mode 0600, where it is not there; grown to what is to land in it.

    Raises PermissionDenied for a path that leaves the segment directory, goes through a symbolic link, names a segment
    or is no plain file, and OutOfSlotMemory for want of room.
    """

    def __init__(self, directory: Path, into: str, offset: int, length: int, budget: Budget) -> None:
        if offset < 0:
            raise PermissionDenied(f"into_offset {offset} is before the file's beginning")
        self._descriptor = _open_beneath(directory, into)
        self.offset = offset
        self.length = length
        try:
            self._grow(into, budget)
        except BaseException:
            self.close()
            raise

    def _grow(self, into: str, budget: Budget) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionDenied(f"{into} is no plain file")
        if self.offset + self.length >= 1 << 62:
            raise OutOfSlotMemory(f"{into} cannot have {self.offset + self.length} bytes")
        end = self.offset + self.length
        if not self.length:
            return
        with budget.admit(Path(into), end, into):
            # its own part alone, so that others in the same file need not wait for all before theirs
            allocate(self._descriptor, self.length, into, self.offset)

    def write(self, views: Sequence[memoryview], at: int) -> int:
        """Writes the views one after another, ``at`` bytes into the landing; returns how many bytes that was."""
        left = [v for v in views if v]
        begin = at
        while left:
            written = os.pwritev(self._descriptor, left[:MOST_VECTORS], self.offset + at)
            at += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
        return at - begin

    def close(self) -> None:
        os.close(self._descriptor)


def _open_beneath(directory: Path, into: str) -> int:
    """Opens ``into`` component by component, so that no symbolic link below ``directory`` is followed."""
    path = PurePath(into)
    if not path.is_relative_to(directory) or ".." in path.parts or path == directory:
        raise PermissionDenied(f"{into} is not below the segment directory {directory}")
    *folders, name = path.relative_to(directory).parts
    if name.startswith(_SEGMENT_NAMES):
        raise PermissionDenied(f"{into} has a segment's name; call scratch files by another")
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise PermissionDenied(f"{into} cannot be opened below {directory}: {error.strerror}") from error
    finally:
        os.close(folder)
