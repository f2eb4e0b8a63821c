"""``python -m tests.sim.fleet_month``: play a month of 1,250 nodes in virtual time under checkers."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.failures import schedule
from bench.goodput.fleet_days import FleetDays
from bench.goodput.fleet_nodes import FleetPlan
from bench.goodput.recovery_model import RecoveryModel
from bench.goodput.runs import site_policy
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import Event
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.transaction import EventNumbers, FindingDelta, Transaction
from tests.sim.checkers.health.eviction_budget import EvictionBudgets
from tests.sim.checkers.health.suspicion import Suspicion
from tests.sim.checkers.jobs.generations import Generations
from tests.sim.cluster.observations import BatchWritten, EventHandled, LeaderDecided, LeaderStarted, Observation
from tests.sim.processes.controller_stubs import METRICS


class CheckingObserver:
    """Pass the core's decisions to the checkers, as if each event were written at once."""

    def __init__(self, policy: CorePolicy) -> None:
        budget = EvictionBudgets()
        budget.world = SimpleNamespace(plan=SimpleNamespace(policy=policy))  # type: ignore[assignment]
        self._checkers: list[Any] = [Generations(), budget, Suspicion()]
        self._event_numbers = EventNumbers(0)
        self._read_models = ReadModels()
        self.state: Any = None
        self.events = 0
        self._observe(LeaderStarted("c1", 1, {}))

    def __call__(self, event: Event, effects: list[Effect], now: float) -> None:
        self.events += 1
        if not effects:
            return
        decide = lambda *_: effects  # noqa: E731 - the fleet has decided already
        transaction = Transaction(
            self.state, Outbox(1), self._event_numbers, METRICS, self._read_models, FindingDelta([]), decide
        )
        transaction.handle(event, now)
        self._observe(EventHandled("c1", 1, event, effects, now))
        self._observe(LeaderDecided("c1", 1, event, effects, now))
        self._observe(BatchWritten(1, transaction.batch()))

    def _observe(self, observation: Observation) -> None:
        for checker in self._checkers:
            watcher = checker.handlers().get(type(observation))
            if watcher is not None:
                watcher(observation)


@dataclass(frozen=True)
class Month:
    """The results of a month."""

    fleet: FleetDays
    events: int
    seconds: float


def play_month(nodes: int, spares: int, days: float, seed: int, on_progress: Any = None) -> Month:
    """Play a fleet under the failure model. Raises Violation."""
    policy = site_policy(nodes)
    plan = FleetPlan(nodes=nodes, spares=spares, hours=24 * days)
    failures = schedule(nodes + spares, plan.hours, random.Random(seed))
    observer = CheckingObserver(policy)
    fleet = FleetDays(plan, failures, policy, RecoveryModel(), seed, observe=observer)
    observer.state = fleet.state
    began_at = time.perf_counter()
    fleet.run(on_progress)
    return Month(fleet, observer.events, time.perf_counter() - began_at)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.fleet_month", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1200, help="nodes of the job (default: 1200)")
    parser.add_argument("--spares", type=int, default=50, help="spare nodes (default: 50)")
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
