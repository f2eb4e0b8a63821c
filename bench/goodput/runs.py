"""One fleet under one set of assumptions: what to play, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.failures import SIGMA, Failure, schedule
from bench.goodput.fleet_days import FleetDays, Regrouped
from bench.goodput.fleet_nodes import FleetPlan
from bench.goodput.recovery_model import GPUS_PER_NODE, RecoveryModel
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.rulebook import with_rules

SEED = 54
NODES_PER_EVICTION = 256
"""Evictions an hour that the site allows: one for so many nodes, and never less than the shipped policy's four."""


@dataclass(frozen=True)
class Assumptions:
    """What a run rests on."""

    days: float = 54.0
    spare_share: float = 1 / 64
    rate: float = 1.0
    sigma: float = SIGMA
    model: RecoveryModel = field(default_factory=RecoveryModel)


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    nodes: int
    spares: int
    days: float
    failures: tuple[Failure, ...]
    fleet: FleetDays

    @property
    def ratio(self) -> float:
        return self.fleet.accounts.ratio()

    @property
    def stops(self) -> int:
        return self.fleet.accounts.stops

    @property
    def lost(self) -> dict[str, float]:
        return self.fleet.accounts.gpu_hours_lost(GPUS_PER_NODE)

    @property
    def spares_used(self) -> int:
        return self.spares - self.fleet.least_spares

    def repriced(self, before: RecoveryModel, after: RecoveryModel) -> float:
        """The ratio where the same decisions cost what ``after`` says. Overlaps of failures are taken as they were."""
        total_s = self.days * 86400.0 * self.nodes
        more_s = sum((price(after, r) - price(before, r)) * self.nodes for r in self.fleet.regroups)
        more_s += self.stops * (after.seen_s - before.seen_s + (after.step_s - before.step_s) / 2) * self.nodes
        return self.ratio - more_s / total_s


def price(model: RecoveryModel, regrouped: Regrouped) -> float:
    """Seconds that a regrouping holds the job up."""
    cost = model.boundary_s if regrouped.at_boundary else model.regroup_s
    return cost(regrouped.nodes, regrouped.newcomers)


def site_policy(nodes: int) -> CorePolicy:
    """The production policy, with a budget for the size of the fleet.

    Commits and comparisons of ranks' speed are made rare: nothing here depends on them, and playing them would take
    longer than the rest.
    """
    allowed = max(4, nodes // NODES_PER_EVICTION)
    return with_rules(CorePolicy()).with_values(
        budget={"count": allowed, "job_count": allowed},
        checkpoints={"commit_interval_s": 3600.0},
        stragglers={"window_s": 3600.0},
    )


def play(nodes: int, assumptions: Assumptions, on_progress: Callable[[float], None] | None = None) -> Outcome:
    """Plays a fleet of ``nodes`` and its spares."""
    spares = round(nodes * assumptions.spare_share)
    hours = assumptions.days * 24
    rng = random.Random(SEED + nodes)
    failures = schedule(nodes + spares, hours, rng, rate=assumptions.rate, sigma=assumptions.sigma)
    plan = FleetPlan(nodes, spares, hours)
    fleet = FleetDays(plan, failures, site_policy(nodes), assumptions.model, SEED)
    fleet.run(on_progress)
    return Outcome(nodes, spares, assumptions.days, tuple(failures), fleet)


def repricings(model: RecoveryModel) -> dict[str, RecoveryModel]:
    """One assumption of the recovery model changed at a time: what is published or feared."""
    changes: dict[str, tuple[str, float]] = {
        "communicators as MegaScale publishes (2.4e-3 s a rank)": ("meet_s_per_rank", 2.4e-3),
        "communicators ten times faster": ("meet_s_per_rank", 1e-5),
        "40 GB of state a GPU": ("state_bytes_per_gpu", 40e9),
        "network cards at a quarter": ("nic_bytes_per_s", model.nic_bytes_per_s / 4),
        "controller's network at a tenth": ("controller_bytes_per_s", model.controller_bytes_per_s / 10),
        "spares without a warm process (30 s)": ("activate_s", 30.0),
        "a step takes 20 s": ("step_s", 20.0),
        "a death is seen by the end of a socket": ("seen_s", model.seen_by_socket_s),
        "a death is seen after 10 s": ("seen_s", 10.0),
    }
    return {name: replace(model, **{field: value}) for name, (field, value) in changes.items()}


def replays(assumptions: Assumptions) -> dict[str, Assumptions]:
    """Assumptions that change what is decided: played again."""
    return {
        "no spares": replace(assumptions, spare_share=0.0),
        "half the spares": replace(assumptions, spare_share=assumptions.spare_share / 2),
        "failures twice as often": replace(assumptions, rate=2.0),
        "all nodes alike (no lemons)": replace(assumptions, sigma=0.0),
    }
