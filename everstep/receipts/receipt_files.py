"""Keep receipts in a folder of this machine, and list them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.errors import DECODE_ERRORS, ConfigurationError
from everstep.host.private_files import make_private_directories, write_private
from everstep.receipts.page import render_page
from everstep.wire.v1.receipts import JobReceipt

FOLDER = "receipts"
"""Name of the folder in the launcher's state directory."""
MAX_RECEIPTS = 200
"""Receipts that are kept: the newest."""
MAX_RECEIPT_BYTES = 8 << 20
"""Size limit of a file that is read as a receipt; a larger one is foreign."""


class StoredReceipt(msgspec.Struct, frozen=True):
    """A receipt and its file; the page is beside it, with another suffix."""

    path: Path
    receipt: JobReceipt

    @property
    def page(self) -> Path:
        """Path of the page for people."""
        return self.path.with_suffix(".html")


def store_receipt(state_dir: Path, receipt: JobReceipt) -> StoredReceipt:
    """Write a receipt as JSON and as a page, both readable by their owner only, and remove the oldest ones.

    Raises OSError if the folder cannot be written.
    """
    folder = state_dir / FOLDER
    make_private_directories(folder)
    ended = datetime.datetime.fromtimestamp(receipt.ended_at, datetime.UTC)
    name, number = f"{receipt.job}-{ended:%Y%m%dT%H%M%SZ}", 1
    path = folder / f"{name}.json"
    while path.exists():  # a job of the same name ended in the same second
        number += 1
        path = folder / f"{name}-{number}.json"
    stored = StoredReceipt(path, receipt)
    write_private(stored.page, render_page(receipt).encode())
    write_private(path, receipt_json(receipt))
    with contextlib.suppress(FileNotFoundError):  # another launcher removes old ones too
        _prune(folder)
    return stored


def receipt_json(receipt: JobReceipt) -> bytes:
    """Return a receipt as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(receipt), indent=2) + b"\n"


def stored_receipts(state_dir: Path) -> list[StoredReceipt]:
    """Return the receipts in a state directory, newest first. Unreadable and foreign files are left out."""
    found = [receipt for path in (state_dir / FOLDER).glob("*.json") for receipt in _read(path)]
    return sorted(found, key=lambda one: (one.receipt.ended_at, one.path.name), reverse=True)


def find_receipt(state_dir: Path, wanted: str) -> StoredReceipt:
    """Return a job's newest receipt, or the one with a number in the list, which begins with 1 for the newest.

    Raises ConfigurationError if there is none.
    """
    stored = stored_receipts(state_dir)
    chosen = next((stored_receipt for stored_receipt in stored if stored_receipt.receipt.job == wanted), None)
    if chosen is None and wanted.isdecimal() and 1 <= int(wanted) <= len(stored):
        chosen = stored[int(wanted) - 1]
    if chosen is None:
        raise ConfigurationError(
            f"{state_dir / FOLDER} has no receipt of {wanted!r}: `everstep runs` lists them. A receipt is written when "
            "a run of everstep-launch with a private controller ends"
        )
    return chosen


def _read(path: Path) -> Iterator[StoredReceipt]:
    with contextlib.suppress(OSError, *DECODE_ERRORS):
        with path.open("rb") as file:
            content = file.read(MAX_RECEIPT_BYTES)
        yield StoredReceipt(path, msgspec.json.decode(content, type=JobReceipt))


def _prune(folder: Path) -> None:
    by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[MAX_RECEIPTS:]:
        old.unlink(missing_ok=True)
        old.with_suffix(".html").unlink(missing_ok=True)
