"""A writer of checkpoints that is killed at one of its writes, in the middle of it; started by a test, without torch.

``python -m tests.support.killed_spill ORDER FOLDER`` kills a writer at its first write, another at its second, and so
on until one comes to its end; after each death another writer completes the work. It prints what the folders of all of
them hold: a digest of names and bytes, the same for all if dying left no trace.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
from everstep_agent.spill import target, writer
from everstep_agent.spill.__main__ import execute
from everstep_agent.spill.order import SpillOrder


class _Doom:
    """Counts writes; the last one is half done when the process ends."""

    def __init__(self, writes: int) -> None:
        self._left = writes

    def strikes(self) -> bool:
        self._left -= 1
        return self._left < 0


def _doomed(order: SpillOrder, doom: _Doom) -> None:
    append, put = target.DirectoryFile.append, target.DirectoryTarget.put

    def dying_append(file: target.DirectoryFile, data: bytes | memoryview) -> None:
        if doom.strikes():
            append(file, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        append(file, data)

    def dying_put(place: target.DirectoryTarget, name: str, data: bytes) -> None:
        if doom.strikes():
            draft = place._root / f"{name}.dead.tmp"
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put(place, name, data)

    target.DirectoryFile.append = dying_append  # type: ignore[method-assign]
    target.DirectoryTarget.put = dying_put  # type: ignore[method-assign]
    execute(order)


def _killed(order: SpillOrder, writes: int) -> bool:
    """Whether a writer that may do so many writes was killed."""
    child = os.fork()
    if child == 0:
        try:
            _doomed(order, _Doom(writes))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def contents(folder: Path) -> str:
    """Of all files but drafts."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp"):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    folder = Path(sys.argv[2])
    order = msgspec.structs.replace(
        msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=SpillOrder), url=str(folder)
    )
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # what is tested dies, not the machine
    seen, deaths = set(), 0
    while _killed(order, deaths):
        deaths += 1
        assert not list(folder.rglob(writer.METADATA_FILE)), "a reader must not see a checkpoint that is not whole"
        execute(order)
        seen.add(contents(folder))
        shutil.rmtree(folder)
    seen.add(contents(folder))
    shutil.rmtree(folder)
    for writes in range(1, deaths + 1):  # and writers that each come one write further than the last one
        _killed(order, writes // 8)
    execute(order)
    seen.add(contents(folder))
    print(deaths, *seen)


if __name__ == "__main__":
    main()
