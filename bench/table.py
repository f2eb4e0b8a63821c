"""One table for every bench: name, value, unit, floor, aim, against, met; printed, and as JSON for machines."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH_IN_A_FILE = 150


@dataclass(frozen=True)
class Row:
    """One measured figure. ``floor`` and ``aim`` are in ``unit``; None where a row is only for comparison.

    ``smaller_is_better`` tells on which side of floor and aim to be. ``against`` names the peer or physical limit the
    figure stands beside.
    """

    name: str
    value: float | None
    unit: str
    floor: float | None = None
    aim: float | None = None
    against: str = ""
    smaller_is_better: bool = True

    @property
    def met(self) -> str:
        """``aim``, ``floor`` or ``no``; a row without a floor is met. A figure that could not be had misses."""
        if self.floor is None and self.aim is None:
            return "aim"
        if self.value is None:
            return "no"
        if self._reaches(self.aim):
            return "aim"
        return "floor" if self._reaches(self.floor) else "no"

    def _reaches(self, mark: float | None) -> bool:
        if mark is None or self.value is None:
            return False
        return self.value <= mark if self.smaller_is_better else self.value >= mark


def marks(judged: bool, floor: float, aim: float) -> tuple[float | None, float | None]:
    """Floor and aim where a row has the size that they are set for."""
    return (floor, aim) if judged else (None, None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def machine() -> dict[str, object]:
    """Return a description of this machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": memory, "kernel": platform.release()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str]:
    """Versions of what was measured, where installed."""
    found = {"python": platform.python_version()}
    for name in ("everstep", "torch", "torchft", "numpy", "msgspec", "xxhash", "fastapi", "uvicorn", "sqlalchemy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m bench.NAME`` with the common flags, and the docstring ``text`` as its help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write machine, versions and rows to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for make bench")
    return parser


def write_json(path: Path, rows: list[Row], also: Mapping[str, object] = MappingProxyType({}), **more: object) -> None:
    """Machine, versions and rows, for machines. ``also``: more about the machine; ``more``: further members."""
    judged = [{**asdict(row), "met": row.met} for row in rows]
    whole = {"machine": {**machine(), **also}, "versions": versions(), **more, "rows": judged}
    path.write_text(json.dumps(whole, indent=2) + "\n")


def run_parts(parts: Sequence[tuple[str, Callable[[], list[Row]]]], json_path: Path | None) -> list[Row]:
    """Measure parts by name, one after another, behind a progress bar; their rows.

    A part that raises RuntimeError is a row that misses its floor. What was measured so far is kept in the JSON.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=len(parts))
        for name, part in parts:
            bar.update(task, description=name)
            try:
                found = part()
            except RuntimeError as error:
                found = [Row(f"{name}: did not run", None, "", 0, against=str(error).strip().splitlines()[-1])]
            for row in found:
                bar.console.print(
                    f"{row.name}: {_number(row.value)} {row.unit} {row.against}", markup=False, soft_wrap=True
                )
            rows += found
            if json_path is not None:
                write_json(json_path, rows)
            bar.advance(task)
    return rows


def finish(title: str, rows: list[Row], json_path: Path | None) -> int:
    """Prints the table, writes the JSON, and returns the exit status: 1 where a row misses its floor."""
    table = Table(title=title)
    for column in ("name", "value", "unit", "floor", "aim", "against", "met"):
        table.add_column(column, justify="right" if column in {"value", "floor", "aim"} else "left")
    colour = {"aim": "green", "floor": "yellow", "no": "red"}
    for row in rows:
        judged = row.floor is not None or row.aim is not None
        met = f"[{colour[row.met]}]{row.met}[/]" if judged else ""
        table.add_row(row.name, _number(row.value), row.unit, _number(row.floor), _number(row.aim), row.against, met)
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_A_FILE).print(table)
    if json_path is not None:
        write_json(json_path, rows)
    return int(any(row.met == "no" for row in rows))
