"""``python -m tests.sim``: play many worlds, or one of them again with details."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.sim.campaign import campaign
from tests.sim.faults.plan import Plan, make_plan
from tests.sim.run import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of worlds to play (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first world (default: 0)")
    parser.add_argument("--jobs", type=int, default=0, help="number of processes (default: one per core)")
    parser.add_argument("--seed", type=int, help="play this world alone")
    parser.add_argument("--faults", help="with --seed: inject only the faults of these numbers, or none")
    parser.add_argument("--trace", action="store_true", help="with --seed: print each event of the world")
    arguments = parser.parse_args()
    if arguments.seed is None:
        return campaign(arguments.first, arguments.seeds, arguments.jobs)
    return _play_one(_select_faults(arguments.seed, arguments.faults), arguments.trace)


def _select_faults(seed: int, faults: str | None) -> Plan:
    plan = make_plan(seed)
    if faults is None:
        return plan
    return plan.only([] if faults == "none" else [int(number) for number in faults.split(",")])


def _play_one(plan: Plan, trace: bool) -> int:
    logging.disable(logging.CRITICAL)
    for number, fault in plan.faults:
        print(f"{number:3} {fault}")
    outcome = play(plan, _print_trace if trace else None)
    print(outcome.sentence or f"all promises held for {outcome.virtual_s:.0f} s of its time")
    return 1 if outcome.checker else 0


def _print_trace(at: float, source: str, message: str) -> None:
    print(f"{at:9.3f} {source:8} {message}")


if __name__ == "__main__":
    sys.exit(main())
