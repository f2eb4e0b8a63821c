"""What a step of bench.gpu hands over: rows, and what it found out about the machine, in a file that grows."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.table import Row

NOT_RUN = "not run: "


class NotRun(Exception):
    """The step needs something that this machine does not have; the message says what."""


def not_run(name: str, why: str) -> Row:
    """A row that is not judged, in place of one that could not be measured here."""
    return Row(name, None, "", against=NOT_RUN + why)


@dataclass
class Sheet:
    """Rows of one step, written with each addition: those of a step that is killed are known up to there."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, object] = field(default_factory=dict)

    def add(self, *rows: Row) -> None:
        self.rows += rows
        self._write()

    def note(self, **found: object) -> None:
        """About the machine."""
        self.machine |= found
        self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"rows": [asdict(row) for row in self.rows], "machine": self.machine}))
        new.replace(self.path)


def read(path: Path) -> Sheet:
    """Return the content that a step has written, empty if there is none."""
    if not path.exists():
        return Sheet(path)
    said = json.loads(path.read_text())
    return Sheet(path, [Row(**row) for row in said["rows"]], said["machine"])


def run(name: str, step: Callable[[Sheet, str], None], sheet: Sheet, device: str) -> int:
    """Run one step, ``step(sheet, device)``; the exit status: 1 where it raised, anything but NotRun."""
    try:
        if device == "cuda":
            require_gpus(1)
        step(sheet, device)
    except NotRun as error:
        sheet.add(not_run(name, str(error)))
    except Exception:  # noqa: BLE001 - the log and the exit status say it
        traceback.print_exc()
        return 1
    return 0


def require_gpus(count: int) -> None:
    """Raises NotRun where the machine has fewer."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        raise NotRun(f"this takes {count} CUDA device{'s' if count > 1 else ''}, and there are {found}")
