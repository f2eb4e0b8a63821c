"""The calm day: harm to programs that do nothing wrong, real hangs, and honest programs under audits.

    python -m bench.calm [--quick] [--only PATTERN ...] [--no-plain] [--logs FOLDER] [--json FILE]

Three parts. ``calm``: ordinary programs run under everstep-launch with default settings, and each rank killed,
regroup, failed job, accused node, missing or doubled side effect and damaged file counts as harm; losses must be those
of torchrun. ``hang``: ranks really hang, and the row says after how many seconds the rank was named. ``honest``:
programs train under audits, with the controller's judge, and each strike, eviction and failed job counts as harm.

Patterns have the part before a slash: ``calm/lone_*``, ``hang/*``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from bench.calm import hangs
from bench.calm.hang_programs import HANGS
from bench.calm.harm import Harm, Harmed, find_harm
from bench.calm.honest import HonestRows
from bench.calm.honest_programs import HONEST
from bench.calm.launched_run import can_mount, run_plainly, run_program
from bench.calm.program import Program
from bench.calm.programs import PROGRAMS
from bench.table import Row, finish, parser_of, run_parts

QUICK = (
    "calm/lone_validation_of_4s",
    "calm/sorting_holds_the_lock",
    "calm/large_save_on_rank_0",
    "calm/weight_clipping",
    "calm/final_save_before_a_barrier",
)


class CalmRows:
    """Measures calm programs, and adds up their harm."""

    def __init__(self, logs: Path, with_plain: bool) -> None:
        self._logs, self._with_plain = logs, with_plain
        self._harms: dict[str, list[Harmed]] = {}

    def measure(self, program: Program) -> list[Row]:
        """Run one program, and return its row."""
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


def main(argv: list[str]) -> int:
    """Run the bench and return its exit status."""
    parser = parser_of("calm", __doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="such as calm/lone_* or hang/*")
    parser.add_argument("--no-plain", action="store_true", help="do not compare losses with torchrun")
    parser.add_argument("--logs", type=Path, default=Path("out/calm"), help="folder for the logs of all programs")
    options = parser.parse_args(argv)
    calm, honest = CalmRows(options.logs, not options.no_plain), HonestRows()
    parts: dict[str, Callable[[], list[Row]]] = {
        **{f"calm/{name}": partial(calm.measure, program) for name, program in PROGRAMS.items()},
        **{f"hang/{name}": partial(hangs.measure, hang, options.logs) for name, hang in HANGS.items()},
        **{f"honest/{name}": partial(honest.measure, program) for name, program in HONEST.items()},
    }
    patterns = options.only or (QUICK if options.quick else ["*"])
    chosen = [part for part in parts.items() if any(fnmatchcase(part[0], pattern) for pattern in patterns)]
    if not chosen:
        parser.error(f"no program matches {' '.join(options.only)}")
    rows = run_parts(chosen, options.json)
    return finish("The calm day", [*calm.totals(), *honest.totals(), *rows], options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
