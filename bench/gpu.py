"""Prove and measure on this machine's GPUs what needs one, within ten minutes: make gpu.

    python -m bench.gpu [--json FILE] [--only NAME] [--limit-s 560] [--docs docs/how-to/gpu.md]
    python -m bench.gpu --from-json FILE        # only write the document, from a run elsewhere
    python -m bench.gpu --device cpu            # the same code in tiny sizes, to see that it runs

Each step is a process of its own with its own time limit. One that fails or hangs is ended with all that it started,
and the next one begins. Exit status: 0, 1 where a floor is missed or a step failed, 2 where nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from bench.gpu_steps import gpu_page
from bench.gpu_steps.bounded_program import ROOT, Outcome, run
from bench.gpu_steps.sheet import Sheet, not_run, read
from bench.table import Row, finish, parser_of, write_json

LIMIT_S = 560.0
LEAST_S = 5.0
"""No step is begun with less left."""
DOCUMENT = ROOT / "docs" / "how-to" / "gpu.md"
FOLDER = ROOT / "out" / "gpu"
TAIL_LINES = 12
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Step:
    """A module of bench.gpu_steps, and the seconds that it may take. ``command``: another program in its place."""

    name: str
    limit_s: float
    command: tuple[str, ...] = ()

    def arguments(self, device: str, rows: Path) -> list[str]:
        program = self.command or (sys.executable, "-m", "bench.gpu_steps", self.name)
        return [*program, "--device", device, "--rows", str(rows)]


STEPS = (
    Step("sensors", 90.0),
    Step("marked_tests", 150.0),
    Step("aborts", 120.0),
    Step("digest", 60.0),
    Step("training", 150.0),
    Step("failover", 120.0),
    Step("compiled", 120.0),
)


@dataclass(frozen=True)
class Done:
    """The outcome of a step."""

    name: str
    outcome: str
    seconds: float


def run_all(steps: Sequence[Step], device: str, folder: Path, limit_s: float) -> tuple[Sheet, list[Done]]:
    """Run the steps one after another; all their rows, and how each ended. ``folder`` keeps the logs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    end = time.monotonic() + limit_s
    whole, done = Sheet(folder / "all.json"), []
    for number, step in enumerate(steps, 1):
        left = end - time.monotonic()
        limit = min(step.limit_s, left)
        if left < LEAST_S:
            whole.add(not_run(step.name, f"the {limit_s:.0f} s of the whole run are over"))
            done.append(Done(step.name, "not begun", 0.0))
            continue
        _say(f"[{number}/{len(steps)}] {step.name} (at most {limit:.0f} s)")
        log, path = folder / f"{step.name}.log", folder / f"{step.name}.json"
        outcome = run(step.arguments(device, path), limit, log, ENVIRONMENT)
        sheet = read(path)
        whole.note(**sheet.machine)
        whole.add(*sheet.rows, *_trouble(step, outcome, limit, log))
        done.append(Done(step.name, _word(outcome), round(outcome.seconds, 1)))
        _say(
            f"[{number}/{len(steps)}] {step.name}: {_word(outcome)} in {outcome.seconds:.0f} s, {len(sheet.rows)} rows"
        )
        if not outcome.ended_well:
            _say("".join(f"    {line}\n" for line in _tail(log, TAIL_LINES)).rstrip())
    return whole, done


def _word(outcome: Outcome) -> str:
    if outcome.status is None:
        return "timed out"
    return "done" if outcome.status == 0 else "failed"


def _trouble(step: Step, outcome: Outcome, limit_s: float, log: Path) -> list[Row]:
    """A row that is not met, for a step that did not end well."""
    if outcome.ended_well:
        return []
    last = next(iter(_tail(log, 1)), "it printed nothing")
    why = f"ended after {limit_s:.0f} s" if outcome.status is None else f"exit status {outcome.status}: {last}"
    return [Row(f"{step.name}: {_word(outcome)}", None, "", 0, against=why)]


def _tail(log: Path, lines: int) -> list[str]:
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, nothing is judged")
    parser.add_argument("--only", help="run the steps whose name contains this")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help=f"for all steps together (default {LIMIT_S:.0f})"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the steps' logs, emptied first")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="write the figures there (default docs/how-to/gpu.md, on GPUs)"
    )
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="run nothing, write the figures of that run")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if options.from_json is not None:
        gpu_page.write_from(options.from_json, options.docs or DOCUMENT)
        return 0
    steps = [step for step in STEPS if not options.only or options.only in step.name]
    sheet, done = run_all(steps, options.device, options.folder, options.limit_s)
    status = finish("On GPUs", sheet.rows, None)
    path = options.json or options.folder / "gpu.json"
    date = datetime.now().astimezone().date().isoformat()
    write_json(path, sheet.rows, sheet.machine, date=date, steps=[asdict(each) for each in done])
    if all(row.value is None for row in sheet.rows):
        _say("Nothing was measured: the table says why.")
        return 2
    document = options.docs or (DOCUMENT if options.device == "cuda" and sheet.machine.get("gpus") else None)
    if document is not None:
        gpu_page.write(document, json.loads(path.read_text()))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
