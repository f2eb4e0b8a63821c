"""The calm day: harm to programs that do nothing wrong, real hangs, and honest programs under audits.

    python -m bench.calm [--quick] [--only PATTERN ...] [--no-plain] [--logs FOLDER] [--json FILE]

Three parts. ``calm``: ordinary programs run under everstep-launch with default settings, and each rank killed,
regroup, failed job, accused node, missing or doubled side effect and damaged file counts as harm; losses must be those
of torchrun. ``hang``: ranks really hang, and the row says after how many seconds the rank was named. ``honest``:
programs train under audits, with the controller's judge, and each strike, eviction and failed job counts as harm.

Patterns have the part before a slash: ``calm/lone_*``, ``hang/*``.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.calm import hangs
from bench.calm.hang_programs import HANGS
from bench.calm.harm import Harm, Harmed, find_harm
from bench.calm.honest import HonestRows
from bench.calm.honest_programs import HONEST
from bench.calm.launched_run import can_mount, run_plainly, run_program
from bench.calm.program import Program
from bench.calm.programs import PROGRAMS
from bench.table import Row, finish, parser_of, write_json

QUICK = (
    "calm/lone_validation_of_4s",
    "calm/sorting_holds_the_lock",
    "calm/large_save_on_rank_0",
    "calm/weight_clipping",
    "calm/final_save_before_a_barrier",
)


@dataclass(frozen=True)
class Measure:
    """One line of the table: a program with the function that measures it."""

    name: str
    run: Callable[[], list[Row]]


class CalmRows:
    """Measures calm programs, and adds up their harm."""

    def __init__(self, logs: Path, with_plain: bool) -> None:
        self._logs, self._with_plain = logs, with_plain
        self._harms: dict[str, list[Harmed]] = {}

    def measures(self) -> Iterator[Measure]:
        """Yield one measure for each program."""
        for name, program in PROGRAMS.items():
            yield Measure(f"calm/{name}", lambda program=program: self._measure(program))  # type: ignore[misc]

    def _measure(self, program: Program) -> list[Row]:
        name = f"calm/{program.name}"
        if program.shared_memory and not can_mount():
            return [Row(name, None, "harms", against="not run: mount namespaces are not permitted here")]
        found = run_program(program, self._logs)
        plain = run_plainly(program) if self._with_plain and program.is_comparable else None
        harms = self._harms[program.name] = find_harm(program, found, plain)
        against = "; ".join(f"{harm.harm}: {harm.sentence}" for harm in harms)[:400]
        seconds = ", ".join(f"{evidence.seconds:.0f} s" for evidence in found)
        return [Row(name, sum(harm.count for harm in harms), "harms", 0, 0, against or seconds)]

    def totals(self) -> list[Row]:
        """Return the sums over all programs that were run."""
        if not self._harms:
            return []
        harmed = sum(bool(harms) for harms in self._harms.values())
        rows = [Row(f"calm: programs harmed, of {len(self._harms)}", harmed, "programs", 0, 0)]
        for kind in Harm:
            count = sum(harm.count for harms in self._harms.values() for harm in harms if harm.harm is kind)
            rows.append(Row(f"calm: {kind}", count, "", 0, 0))
        return rows


def choose(measures: list[Measure], patterns: list[str]) -> list[Measure]:
    """Return the measures whose names match one of the patterns; all without patterns."""
    if not patterns:
        return measures
    return [measure for measure in measures if any(fnmatchcase(measure.name, pattern) for pattern in patterns)]


def main(argv: list[str]) -> int:
    """Run the bench and return its exit status."""
    parser = parser_of("calm", __doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="such as calm/lone_* or hang/*")
    parser.add_argument("--no-plain", action="store_true", help="do not compare losses with torchrun")
    parser.add_argument("--logs", type=Path, default=Path("out/calm"), help="folder for the logs of all programs")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    calm = CalmRows(options.logs, not options.no_plain)
    hanging = [
        Measure(f"hang/{name}", lambda hang=hang: hangs.measure(hang, options.logs))  # type: ignore[misc]
        for name, hang in HANGS.items()
    ]
    honest = HonestRows()
    under_audits = [
        Measure(f"honest/{name}", lambda program=program: honest.measure(program))  # type: ignore[misc]
        for name, program in HONEST.items()
    ]
    chosen = choose([*calm.measures(), *hanging, *under_audits], options.only or (list(QUICK) if options.quick else []))
    if not chosen:
        parser.error(f"no program matches {' '.join(options.only)}")
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("calm", total=len(chosen))
        for measure in chosen:
            bar.update(task, description=measure.name)
            found = measure.run()
            for row in found:
                bar.console.print(f"{row.name}: {row.value if row.value is not None else '-'} {row.unit} {row.against}")
            rows += found
            if options.json is not None:
                write_json(options.json, rows)  # what was measured so far outlives a measure that fails
            bar.advance(task)
    return finish("The calm day", [*calm.totals(), *honest.totals(), *rows], options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
