"""``python -m tests.integration.fleet.soak``: see ``tests/integration/fleet/soak/__init__.py``."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

import tests.integration.fleet.soak
from bench.table import Row, finish, parser_of
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.operator import JobDetail
from examples.demo.story import Run
from examples.demo.world import World
from tests.integration.fleet.soak import checks
from tests.integration.fleet.soak.faults import draw_fault
from tests.integration.fleet.soak.simulated_fleet import NAMES, Fleet, undisturbed

CLOSEST_S, FARTHEST_S = 0.05, 3.0
CALM_S = (1.0, 5.0)
LARGEST_BURST = 5
BACK_WITHIN_S = 240.0
LAST_STEPS = 60
"""Steps between the announcement of the last one and that: no rank may have passed it when it hears of it."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("soak", tests.integration.fleet.soak.__doc__)
    parser.prog = "python -m tests.integration.fleet.soak"
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults are struck")
    parser.add_argument("--seed", type=int, default=1, help="draws the faults, their victims and their moments")
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step waits, for small machines")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="where logs and step logs go")
    parsed = parser.parse_args(argv)
    parsed.seconds = min(parsed.seconds, 30.0) if parsed.quick else parsed.seconds
    return parsed


def strike(fleet: Fleet, draw: random.Random, seconds: float, story: Path) -> Counter[str]:
    """Bursts of faults with calm between them, for ``seconds``; returns how often each struck."""
    struck: Counter[str] = Counter()
    end = time.perf_counter() + seconds
    with story.open("w", buffering=1) as told:
        while time.perf_counter() < end and not fleet.is_over:
            for _ in range(draw.randint(1, LARGEST_BURST)):
                fault = draw_fault(draw)
                if said := fault.strike(fleet, draw):
                    struck[fault.name] += 1
                    told.write(f"{SYSTEM_CLOCK.wall():.3f} step {fleet.step()}: {fault.name}: {said}\n")
                fleet.pause(draw.choice([draw.uniform(CLOSEST_S, 0.5), draw.uniform(0.5, FARTHEST_S)]))
            fleet.pause(draw.uniform(*CALM_S))
    return struck


def table(
    struck: Counter[str], run: Run, leftovers: list[str], problems: list[str], job: JobDetail | None
) -> list[Row]:
    """The figures of a soak."""
    gaps = checks.recoveries_s(run)
    rows = [Row("faults", struck.total(), "")]
    rows += [Row(f"  {name}", count, "") for name, count in sorted(struck.items())]
    rows += [
        Row("generations", job.summary.generation if job else None, ""),
        Row("generations that stepped", len({step.generation for step in run.finished}), ""),
        Row("steps finished", len(run.finished), "steps"),
        Row("finished steps computed again, in all", run.lost().total(), "steps"),
        Row("finished steps computed again, most in one recovery", max(run.lost().values(), default=0), "steps"),
        Row("recovery, median", sorted(gaps)[len(gaps) // 2] if gaps else None, "s"),
        Row("recovery, worst", max(gaps, default=None), "s"),
        Row("left behind", len(leftovers), "", 0, 0),
        Row("problems", len(problems), "", 0, 0),
    ]
    return rows


def soak(options: argparse.Namespace, world: World) -> int:
    """A whole soak in ``world``; returns the exit status."""
    fleet = Fleet(world, options.layout, options.pace)
    problems, leftovers, struck = fleet.problems, list[str](), Counter[str]()
    last = 0
    try:
        fleet.assemble()
        struck = strike(fleet, random.Random(options.seed), options.seconds, options.out / "story.txt")
        last = fleet.finish(LAST_STEPS, BACK_WITHIN_S)
    except TimeoutError as error:
        problems.append(f"waited in vain for: {error}")
    else:
        leftovers = fleet.leave()
    fleet.watch.close()
    events = fleet.watch.events
    (options.out / "events.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, events)) + b"\n")
    run = Run.read(world.steps)
    problems += checks.generations_rise(events) + checks.processes_go_forward(world.steps)
    problems += checks.evictions_have_a_cause(events, fleet.evictable) + checks.logs_are_calm(world.logs)
    if last:
        _, wrong = checks.as_undisturbed(run, undisturbed(world, options.layout, last), last)
        problems += wrong
    rows = table(struck, run, leftovers, problems, fleet.watch.job)
    status = finish(f"{options.layout}, seed {options.seed}, {options.seconds:g} s of faults", rows, options.json)
    for problem in (*leftovers, *problems):
        print(f"- {problem}")
    return status


def main(argv: list[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    options.out.mkdir(parents=True, exist_ok=True)
    with World(options.out, NAMES) as world:
        return soak(options, world)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
