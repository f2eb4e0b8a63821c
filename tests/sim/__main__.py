"""``python -m tests.sim``: plays many seeds, or one of them again and in detail."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.sim.campaign import campaign
from tests.sim.plan import Plan, make
from tests.sim.run import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds to play (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, help="play this world alone")
    parser.add_argument("--faults", help="with --seed: play only these faults, by their numbers; none for none")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    arguments = parser.parse_args()
    if arguments.seed is None:
        return campaign(arguments.first, arguments.seeds, arguments.jobs)
    return _one(_chosen(arguments.seed, arguments.faults), arguments.trace)


def _chosen(seed: int, faults: str | None) -> Plan:
    plan = make(seed)
    if faults is None:
        return plan
    return plan.only([] if faults == "none" else [int(place) for place in faults.split(",")])


def _one(plan: Plan, trace: bool) -> int:
    logging.disable(logging.CRITICAL)
    for place, fault in plan.faults:
        print(f"{place:3} {fault}")
    outcome = play(plan, _line if trace else None)
    print(outcome.sentence or f"all promises held for {outcome.virtual_s:.0f} s of its time")
    return 1 if outcome.checker else 0


def _line(at: float, who: str, words: str) -> None:
    print(f"{at:9.3f} {who:8} {words}")


if __name__ == "__main__":
    sys.exit(main())
