"""Checkpoint writers that are killed in the middle of a write, without torch.

    python -m tests.unit.agent.spill.killed_spill ORDER FOLDER

The program kills a writer at its first write, another one at its second write, and so on until a writer finishes. After
each kill another writer completes the checkpoint. The program prints the number of kills, and a digest of the names and
bytes of each completed checkpoint. All digests are equal if a killed writer leaves no trace.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from everstep.layout.stored_checkpoints import METADATA_FILE
from everstep_agent.spill import target
from everstep_agent.spill.__main__ import execute
from everstep_agent.spill.order import SpillOrder


class _WriteLimit:
    """A number of writes, after which the process is killed in the middle of a write."""

    def __init__(self, writes: int) -> None:
        self._left = writes

    def is_exceeded(self) -> bool:
        self._left -= 1
        return self._left < 0


def _execute_with_limit(order: SpillOrder, limit: _WriteLimit) -> None:
    append, put = target.DirectoryFile.append, target.DirectoryTarget.put

    def limited_append(file: target.DirectoryFile, data: bytes | memoryview) -> None:
        if limit.is_exceeded():
            append(file, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        append(file, data)

    def limited_put(directory: target.DirectoryTarget, name: str, data: bytes) -> None:
        if limit.is_exceeded():
            draft = directory._root / f"{name}.dead.tmp"
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put(directory, name, data)

    target.DirectoryFile.append = limited_append  # type: ignore[assignment, method-assign]
    target.DirectoryTarget.put = limited_put  # type: ignore[assignment, method-assign]
    execute(order)


def _killed(order: SpillOrder, writes: int) -> bool:
    """Return whether a writer with this limit of writes was killed."""
    child = os.fork()
    if child == 0:
        try:
            _execute_with_limit(order, _WriteLimit(writes))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def contents(folder: Path) -> str:
    """Return a digest of all files except drafts."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp"):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    folder = Path(sys.argv[2])
    order = msgspec.structs.replace(
        msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=SpillOrder), url=str(folder)
    )
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # only processes are killed, not the machine
    digests, kills = set(), 0
    while _killed(order, kills):
        kills += 1
        assert not list(folder.rglob(METADATA_FILE)), "a reader must not see an incomplete checkpoint"
        execute(order)
        digests.add(contents(folder))
        shutil.rmtree(folder)
    digests.add(contents(folder))
    shutil.rmtree(folder)
    for writes in range(1, kills + 1):  # consecutive writers that finish more writes
        _killed(order, writes // 8)
    execute(order)
    digests.add(contents(folder))
    print(kills, *digests)


if __name__ == "__main__":
    main()
