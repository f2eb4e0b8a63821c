"""Check torch.save's archives, fetch remote files, and retry failing storage.

torch's own reader ignores the checksums of its zip archives. The checks cover what torch uses: the directory's entries
against the records' own headers, and the CRC-32 of each record that is read.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import random
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import torch

from everstep.clock import Backoff
from everstep.errors import NotRestorable
from everstep.layout.object_storage import storage_errors
from everstep_trainer.base.interrupt import WAIT_SLICE_S

_DATA = re.compile(r"[^/]+/data/[^/]+")  # a record with a tensor's bytes; all others are small
_CHUNK_BYTES = 1 << 20
_MALFORMED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, OverflowError, OSError)
_UNSUPPORTED = (NotImplementedError, RuntimeError)
"""Errors that ``zipfile`` raises for a damaged directory: offsets before the file's begin, unknown compressions."""


class DamagedCheckpoint(NotRestorable):
    """Stored data is incomplete or not what was written: another checkpoint may serve."""


@contextmanager
def _zip_errors(label: str) -> Iterator[None]:
    try:
        yield
    except (*_MALFORMED, *_UNSUPPORTED) as error:
        message = f"{label} is damaged, or not a zip archive of torch.save (since torch 1.6): {error}"
        raise DamagedCheckpoint(message) from error


def check_archive(data: bytes, label: str) -> None:
    """Check all of an archive in memory. Raises DamagedCheckpoint, naming ``label``."""
    with _zip_errors(label), zipfile.ZipFile(io.BytesIO(data)) as archive:
        for record in archive.infolist():
            _check_record(archive, record)


def _check_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise zipfile.BadZipFile(f"{record.filename} is compressed")
    with archive.open(record) as file:  # compares the checksum at its end
        while file.read(_CHUNK_BYTES):
            pass


class MappedArchive:
    """An archive that ``load`` maps; each record is checked on first use. Raises DamagedCheckpoint with ``label``."""

    def __init__(self, path: str, label: str, load: Callable[[], object]) -> None:
        self._label = label
        self._unchecked: dict[str, zipfile.ZipInfo] = {}
        with _zip_errors(label):
            self._zip = zipfile.ZipFile(path)
            for record in self._zip.infolist():
                if _DATA.fullmatch(record.filename):
                    self._unchecked[record.filename] = record
                else:
                    _check_record(self._zip, record)
        self._records = sorted(self._unchecked.values(), key=lambda record: record.header_offset)
        self.content = load()
        self._mappings = list(_mappings_of(path))

    def check(self, value: object) -> None:
        """Check a tensor's bytes; for a value that may contain tensors, all bytes. Raises DamagedCheckpoint."""
        if isinstance(value, torch.Tensor):
            self._check(self._record_of(value))
        elif not isinstance(value, str | bytes | int | float | bool | None):
            self._check(self._records)

    def _check(self, records: list[zipfile.ZipInfo]) -> None:
        for record in records:
            if record.filename in self._unchecked:
                with _zip_errors(self._label):
                    _check_record(self._zip, record)
                del self._unchecked[record.filename]

    def _record_of(self, tensor: torch.Tensor) -> list[zipfile.ZipInfo]:
        """Return the record that the tensor's storage is mapped from; all records if it is elsewhere."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return self._records
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        for begin, end, offset in self._mappings:
            if begin <= first and first + storage.nbytes() <= end:
                at = first - begin + offset
                number = bisect_right(self._records, at, key=lambda record: record.header_offset) - 1
                if number >= 0 and storage.nbytes() <= self._records[number].file_size:
                    return [self._records[number]]
        return self._records


def _mappings_of(path: str) -> Iterator[tuple[int, int, int]]:
    """Yield the file's mappings in this process: first and last address, and the first one's offset in the file."""
    real = os.path.realpath(path)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == real:
            begin, _, end = fields[0].partition("-")
            yield int(begin, 16), int(end, 16), int(fields[2], 16)


# ---- file of an object store on this node's disk: fetched once for all processes of the node, mapped, and removed

_COPY_CHUNK = 16 << 20


@contextmanager
def fetch_to_local(filesystem: Any, path: str, url: str) -> Iterator[Path]:
    """Fetch the file of ``url`` into ``TMPDIR`` and yield its path. In the block no other process removes or checks it:
    map it there, and unlink it after the last use. Raises OSError, or NotRestorable for a lack of room."""
    size = filesystem.info(path).get("size")
    if size is None:
        raise NotRestorable(f"{url} has an unknown size. {_FIX_HINT}")
    local = Path(tempfile.gettempdir()) / f"everstep-start-{os.getuid()}-{filesystem.ukey(path)[:32]}.pt"
    descriptor = _locked(local)
    try:
        if os.fstat(descriptor).st_size != size:  # no process has it mapped, since it was never complete
            _fetch(filesystem, path, url, descriptor, size)
        yield local
    except BaseException:
        local.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


_FIX_HINT = (
    "Convert it to a folder, from which each rank reads only its part "
    "(torch.distributed.checkpoint.format_utils.torch_save_to_dcp)"
)


def _locked(local: Path) -> int:
    """Open the file at ``local``, making it if needed, under a lock that other processes wait for."""
    while True:
        descriptor = os.open(local, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{local} belongs to another user")
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                sleep(WAIT_SLICE_S)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), local.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed while this process waited


def _fetch(filesystem: Any, path: str, url: str, descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, 0)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise NotRestorable(
            f"{url} has {size} bytes, but {tempfile.gettempdir()} has room for {free}: such a file is fetched first, "
            f"since every rank maps it. Set TMPDIR to a larger disk. {_FIX_HINT}"
        )
    with filesystem.open(path, "rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
        while chunk := source.read(_COPY_CHUNK):
            target.write(chunk)
    if (came := os.fstat(descriptor).st_size) != size:
        raise OSError(f"{url} has {size} bytes, but {came} were received")


# ---- retries: failing storage is asked again, damaged data is read once more, missing files are final

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_BACKOFF = Backoff(floor_s=0.5, ceiling_s=8.0)
MAX_TRIES = 5  # with at most 0.5, 1, 2 and 4 s in between; a job that goes back a checkpoint loses many minutes
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors about what is there, not about reaching it."""


def sleep_in_slices(seconds: float) -> None:
    for _ in range(round(seconds / WAIT_SLICE_S)):
        sleep(WAIT_SLICE_S)


def retry_read(read: Callable[[], T], wait: Callable[[float], None] = sleep_in_slices) -> T:
    """Return the result of ``read``, retried when storage fails, and once after DamagedCheckpoint (a bit may have
    flipped in transit). Raises the last error, as OSError if only the storage's package defines it."""
    failed, damaged = 0, False
    while True:
        try:
            return read()
        except _PERMANENT_ERRORS:
            raise
        except DamagedCheckpoint as error:
            if damaged:
                raise
            damaged = True
            log.warning("reading storage once more: %s", error)
        except storage_errors() as error:
            failed += 1
            if failed == MAX_TRIES:
                raise error if isinstance(error, OSError) else OSError(str(error)) from error
            log.warning("storage failed, attempt %d of %d: %s", failed, MAX_TRIES, error)
            wait(RETRY_BACKOFF.delay_s(failed - 1, random.random()))
