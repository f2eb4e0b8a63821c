"""Keep the results of a bench as JSON lines, so that a later run goes on where an earlier one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Store:
    """Records by cell and number, one file per cell.

    A line that was cut off by the end of a process is ignored, and its record is made again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._cells: dict[str, dict[int, dict[str, Any]]] = {}

    def records(self, cell: str) -> dict[int, dict[str, Any]]:
        """Return the records of a cell by number."""
        if cell not in self._cells:
            self._cells[cell] = {}
            path = self._path(cell)
            for line in path.read_text().splitlines() if path.exists() else []:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self._cells[cell][record.pop("number")] = record
        return self._cells[cell]

    def add(self, cell: str, number: int, record: dict[str, Any]) -> None:
        """Append a record."""
        known = self.records(cell)
        path = self._path(cell)
        with path.open("ab+") as file:
            if file.tell() and not _ends_line(path):
                file.write(b"\n")
            file.write(json.dumps({"number": number, **record}).encode() + b"\n")
        known[number] = record

    def cells(self) -> list[str]:
        """Return the names of all cells with records."""
        return sorted(path.stem.replace("~", "/") for path in self._folder.glob("*.jsonl"))

    def _path(self, cell: str) -> Path:
        return self._folder / f"{cell.replace('/', '~')}.jsonl"


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
