"""The hooks' cost per step, and where their CPU time goes, beside plain DistributedDataParallel.

    python -m bench.hook_cost [--models linear,gpt,convolutions] [--runs 10] [--steps N] [--layout ddp|inexact]
                              [--json FILE]

Runs with and without Everstep take turns; each pair has a ratio of its own, so that a machine that becomes slower
changes neither. The median of the ratios is judged. The CPU time of a step (all four ranks, and the processes beside
them) differs less between runs than its duration.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from bench.hook_models import MODELS
from bench.peers.run import train_plainly
from bench.recovery_rows.everstep_runs import Fleet
from bench.recovery_rows.recoveries import read, step_seconds
from bench.table import Row, finish, parser_of, write_json
from everstep.native import copy_hash
from everstep_trainer.snapshot.pace import PACE_WINDOW
from examples.demo.world import descendants, wait_for

FLOOR, AIM = 4.0, 2.0
PATIENCE_S = 300.0
WARM_UP = 2 * PACE_WINDOW + 2
"""Steps until the distance of snapshots is chosen, and everything is allocated."""
STEPS = {"linear": 200, "gpt": 50, "convolutions": 100}
BESIDE = {
    "everstep: standby": "standby",
    "everstep_trainer.launch.forking.forkserver": "fork server",
    "everstep_trainer.launch": "launcher",
    "everstep_agent.sensors": "sensors",
    "everstep_agent.vault": "vault",
    "everstep_agent": "agent",
    "everstep_controller": "controller",
}
"""Names of processes beside the ranks, by a part of their command line; the first that fits counts."""


@dataclass
class Steps:
    """Seconds of rank 0's steps in one run, and milliseconds of CPU of a step of all ranks, by thread or process."""

    seconds: list[float]
    cpu_ms: dict[str, float] = field(default_factory=dict)


def cpu_of_ranks(folder: Path) -> dict[str, float]:
    """Milliseconds of CPU of a step of all ranks, by thread, between the two steps at which they logged it."""
    spent: dict[str, float] = defaultdict(float)
    for rows in read(folder).values():
        logged = [row for row in rows if row["event"] == "cpu"]
        if len(logged) == 2:
            first, last = logged
            for name, seconds in last["threads"].items():
                passed = seconds - first["threads"].get(name, 0.0)
                spent[name] += 1000 * passed / (last["step"] - first["step"])
    return dict(spent)


def cpu_beside(known: set[int]) -> dict[str, float]:
    """CPU seconds so far of this process's descendants other than the ranks, by their purpose."""
    spent: dict[str, float] = defaultdict(float)
    for pid in descendants(os.getpid())[1:]:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            tasks = [int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            continue
        if pid not in known:
            purpose = next((name for part, name in BESIDE.items() if part in command), command.split(" ")[0] or "?")
            spent[purpose] += sum(tasks) / 1e9
    return spent


def hooked(steps: int, layout: str) -> Steps:
    """Run the chosen model under Everstep."""
    with Fleet(layout, steps, "-1::between:KILL") as fleet:
        folder = fleet.folder / "steps"
        beside = [_beside(folder, step) for step in (WARM_UP, steps - 1)]
        fleet.finish(PATIENCE_S)
        counted = steps - 1 - WARM_UP
        passed = {name: (seconds - beside[0].get(name, 0.0)) / counted for name, seconds in beside[1].items()}
        by_part = cpu_of_ranks(folder) | {name: 1000 * seconds for name, seconds in passed.items()}
        return Steps(step_seconds(folder, WARM_UP), by_part)


def _beside(folder: Path, step: int) -> dict[str, float]:
    """Return what the processes beside the ranks had used when rank 0 finished ``step``. Waits for that."""
    wait_for(lambda: any(folder.glob(f"rank0-*.cpu-{step}")), f"step {step}", PATIENCE_S)
    return cpu_beside({int(name.rpartition("-")[2]) for name in read(folder)})


def plain(steps: int) -> Steps:
    """Run the chosen model in plain DistributedDataParallel."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        train_plainly(Path(name), steps)
        return Steps(step_seconds(Path(name), WARM_UP), cpu_of_ranks(Path(name)))


def rows_of(model: str, pairs: list[tuple[Steps, Steps]]) -> list[Row]:
    """The figures of one model. ``pairs``: a run without Everstep and one with it, in turns."""
    without, with_hooks = zip(*pairs, strict=True)
    ratios = [statistics.median(ours.seconds) / statistics.median(other.seconds) for other, ours in pairs]
    print(f"{model}: {', '.join(f'{100 * (ratio - 1):.1f}' for ratio in ratios)} %")
    rows = [
        Row(f"{model}: plain step", 1000 * statistics.median(map(_median_s, without)), "ms"),
        Row(f"{model}: step under Everstep", 1000 * statistics.median(map(_median_s, with_hooks)), "ms"),
        Row(f"{model}: hooks' cost per step", 100 * (statistics.median(ratios) - 1), "%", FLOOR, AIM, "plain DDP"),
        Row(f"{model}: the same, least of {len(pairs)} pairs", 100 * (min(ratios) - 1), "%"),
        Row(f"{model}: the same, most of {len(pairs)} pairs", 100 * (max(ratios) - 1), "%"),
    ]
    for name, runs in (("plain", without), ("Everstep", with_hooks)):
        rows.append(Row(f"{model}: CPU of a step, {name}, all", _median_ms(runs, None), "ms"))
        for part in sorted({part for run in runs for part in run.cpu_ms}):
            rows.append(Row(f"{model}: CPU of a step, {name}, {part}", _median_ms(runs, part), "ms"))
    return rows


def _median_s(run: Steps) -> float:
    return statistics.median(run.seconds)


def _median_ms(runs: tuple[Steps, ...], part: str | None) -> float:
    """Median over runs of the CPU of one part, or of all."""
    return statistics.median(sum(run.cpu_ms.values()) if part is None else run.cpu_ms.get(part, 0.0) for run in runs)


def main(argv: list[str]) -> int:
    parser = parser_of("hook_cost", __doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), help=",".join(MODELS))
    parser.add_argument("--runs", type=int, default=10, help="pairs of runs of each model")
    parser.add_argument("--steps", type=int, help=f"steps of a run, after {WARM_UP} to warm up")
    parser.add_argument("--layout", default="ddp", help="ddp (exact), or inexact")
    options = parser.parse_args(argv)
    models = options.models or (["linear"] if options.quick else list(MODELS))
    if unknown := set(models) - set(MODELS):
        parser.error(f"--models {','.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    if copy_hash is None:
        print(
            "without everstep/native/copy_hash.so, which an installation compiles, snapshots cost more", file=sys.stderr
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    runs = 2 if options.quick else options.runs
    rows: list[Row] = []
    with Progress() as progress:
        task = progress.add_task("hooks", total=runs * len(models))
        for model in models:
            steps, pairs = WARM_UP + (options.steps or STEPS[model]), []
            os.environ |= {"BENCH_MODEL": model, "BENCH_CPU_STEPS": f"{WARM_UP},{steps - 1}"}
            progress.update(task, description=model)
            for _ in range(runs):
                pairs.append((plain(steps), hooked(steps, options.layout)))
                progress.advance(task)
            rows += rows_of(model, pairs)
            if options.json is not None:
                write_json(options.json, rows)  # what was measured so far outlives a model that fails
    return finish("What the hooks cost", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
