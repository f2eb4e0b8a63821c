"""A file of an object store on this node's disk: fetched once for all processes of the node, mapped, and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

from everstep.errors import NotRestorable
from trainer_hooks.interrupt import SLICE_S

_CHUNK = 16 << 20


@contextmanager
def fetched(filesystem: Any, path: str, url: str) -> Iterator[Path]:
    """Where the file of ``url`` lies on this machine, in the folder for temporary files (``TMPDIR``).

    Until the block ends no other process removes it or looks whether it is whole: map it in there, and unlink it when
    nobody is about to map it any more. A block that raises unlinks it, since what came may not be what is stored.

    Raises NotRestorable where there is no room for it, OSError.
    """
    size = filesystem.info(path).get("size")
    if size is None:
        raise NotRestorable(f"{url} does not say how large it is. {_MEND}")
    local = Path(tempfile.gettempdir()) / f"everstep-start-{os.getuid()}-{filesystem.ukey(path)[:32]}.pt"
    descriptor = _locked(local)
    try:
        if os.fstat(descriptor).st_size != size:  # nobody has it mapped: it never was whole
            _fetch(filesystem, path, url, descriptor, size)
        yield local
    except BaseException:
        local.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


_MEND = (
    "Convert it to a folder, of which each rank reads what it needs "
    "(torch.distributed.checkpoint.format_utils.torch_save_to_dcp)"
)


def _locked(local: Path) -> int:
    """The file at ``local``, made if need be, which other processes wait for."""
    while True:
        descriptor = os.open(local, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{local} belongs to another user")
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                sleep(SLICE_S)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), local.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed while we waited


def _fetch(filesystem: Any, path: str, url: str, descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, 0)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise NotRestorable(
            f"{url} has {size} bytes, and {tempfile.gettempdir()} room for {free}: every rank maps such a file, so it "
            f"is fetched first. Set TMPDIR to a larger disk, or: {_MEND[0].lower()}{_MEND[1:]}"
        )
    with filesystem.open(path, "rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
        while chunk := source.read(_CHUNK):
            target.write(chunk)
    if (came := os.fstat(descriptor).st_size) != size:
        raise OSError(f"{url} has {size} bytes, and {came} came")
