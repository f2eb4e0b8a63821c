"""Checksums of the zip archives that torch.save writes: torch's own reader passes over them.

What is looked at is what torch uses: the directory's entries against the records' own headers, and the CRC-32 of each
record that is read.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from everstep.errors import NotRestorable

_DATA = re.compile(r"[^/]+/data/[^/]+")
"""The record of a tensor's bytes; all others are small."""
_CHUNK = 1 << 20
_MALFORMED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, OverflowError, OSError)
_UNSUPPORTED = (NotImplementedError, RuntimeError)
"""What a damaged directory comes to in ``zipfile``: offsets before the file's begin, compressions that nobody has."""


class Damaged(NotRestorable):
    """What is stored is not what was written, or not all of it is there: another checkpoint may serve."""


@contextmanager
def _zip_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (*_MALFORMED, *_UNSUPPORTED) as error:
        raise Damaged(
            f"{what} is damaged, or not what torch.save writes (a zip archive, since torch 1.6): {error}"
        ) from error


def check_archive(data: bytes, what: str) -> None:
    """Looks at all of an archive in memory. Raises Damaged, which names ``what``."""
    with _zip_errors(what), zipfile.ZipFile(io.BytesIO(data)) as archive:
        for record in archive.infolist():
            _check_record(archive, record)


def _check_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise zipfile.BadZipFile(f"{record.filename} is compressed")
    with archive.open(record) as file:  # which compares the checksum when it comes to the end
        while file.read(_CHUNK):
            pass


class MappedArchive:
    """An archive whose tensors torch has mapped: each record is looked at when something of it is first used.

    Args:
        path: of the file, on this machine.
        what: its name in errors.
        load: maps it, and returns what is in it.

    Raises Damaged where the archive, or a record that is no tensor's, is not what was written.
    """

    def __init__(self, path: str, what: str, load: Callable[[], object]) -> None:
        self._what = what
        self._unchecked: dict[str, zipfile.ZipInfo] = {}
        with _zip_errors(what):
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
        """Looks at a tensor's bytes; for another value that may have tensors in it, at all bytes. Raises Damaged."""
        if isinstance(value, torch.Tensor):
            self._check(self._record_of(value))
        elif not isinstance(value, str | bytes | int | float | bool | None):
            self._check(self._records)

    def _check(self, records: list[zipfile.ZipInfo]) -> None:
        for record in records:
            if record.filename in self._unchecked:
                with _zip_errors(self._what):
                    _check_record(self._zip, record)
                del self._unchecked[record.filename]

    def _record_of(self, tensor: torch.Tensor) -> list[zipfile.ZipInfo]:
        """The record that the tensor's storage is mapped from; all of them where it lies elsewhere."""
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
    """Where the file is mapped in this process: the first and last address, and the offset of the first in it."""
    real = os.path.realpath(path)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == real:
            begin, _, end = fields[0].partition("-")
            yield int(begin, 16), int(end, 16), int(fields[2], 16)
