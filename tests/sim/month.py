"""``python -m tests.sim.month``: a month of 1,250 nodes in virtual time, with checkers that look on."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from everstep_controller.core.effects import Effect
from everstep_controller.core.events import Event
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.transaction import AuditNumbers, FindingDelta, Transaction
from rich.console import Console
from rich.progress import Progress

from bench.failures import schedule
from bench.goodput.fleet_days import FleetDays, FleetPlan
from bench.goodput.recovery_model import RecoveryModel
from bench.goodput.runs import Assumptions, site_policy
from tests.sim import facts
from tests.sim.checkers.budget import Budget
from tests.sim.checkers.generations import Generations
from tests.sim.checkers.suspicion import Suspicion
from tests.sim.shell_parts import METRICS


class Onlooker:
    """Shows the checkers what a fleet's core decides, as if each event were written at once."""

    def __init__(self, policy: CorePolicy) -> None:
        budget = Budget()
        budget.world = SimpleNamespace(plan=SimpleNamespace(policy=policy))  # type: ignore[assignment]
        self._checkers: list[Any] = [Generations(), budget, Suspicion()]
        self._numbers = AuditNumbers(0)
        self._boards = ReadModels()
        self.state: Any = None
        self.events = 0
        self._see(facts.TookOver("c1", 1, {}))

    def __call__(self, event: Event, effects: list[Effect], now: float) -> None:
        self.events += 1
        if not effects:
            return
        decide = lambda *_: effects  # noqa: E731 - it was decided already
        written = Transaction(self.state, Outbox(1), self._numbers, METRICS, self._boards, FindingDelta([]), decide)
        written.handle(event, now)
        self._see(facts.Handled("c1", 1, event, effects, now))
        self._see(facts.Decided("c1", 1, event, effects, now))
        self._see(facts.Durable(1, written.batch()))

    def _see(self, fact: facts.Fact) -> None:
        for checker in self._checkers:
            watcher = checker.watches().get(type(fact))
            if watcher is not None:
                watcher(fact)


@dataclass(frozen=True)
class Month:
    """What came of it."""

    fleet: FleetDays
    events: int
    seconds: float


def play_month(nodes: int, spares: int, days: float, seed: int, on_progress: Any = None) -> Month:
    """Plays a fleet under the failure model. Raises Violation."""
    policy = site_policy(nodes, Assumptions())
    plan = FleetPlan(nodes=nodes, spares=spares, hours=24 * days)
    failures = schedule(nodes + spares, plan.hours, random.Random(seed))
    onlooker = Onlooker(policy)
    fleet = FleetDays(plan, failures, policy, RecoveryModel(), seed, observe=onlooker)
    onlooker.state = fleet.state
    began = time.perf_counter()
    fleet.run(on_progress)
    return Month(fleet, onlooker.events, time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.month", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1200, help="of the job (default: 1200)")
    parser.add_argument("--spares", type=int, default=50, help="beside them (default: 50)")
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("days", total=1.0)
        month = play_month(
            arguments.nodes,
            arguments.spares,
            arguments.days,
            arguments.seed,
            lambda share: progress.update(task, completed=share),
        )
    fleet = month.fleet
    print(
        f"{arguments.days:g} days of {len(fleet.nodes)} nodes in {month.seconds:.1f} s: {month.events} events, "
        f"{fleet.accounts.stops} interruptions, {100 * fleet.accounts.ratio():.2f} % effective training time, "
        f"{len(fleet.false_evictions)} false evictions"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
