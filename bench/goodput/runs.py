"""One fleet under one set of assumptions: what to play, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

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
    """What a run rests on. ``evictions_per_hour`` None: by the fleet's size. ``repair``: a factor on the hours that
    repairs take; ``shocks``: whether causes that take several nodes do."""

    days: float = 54.0
    spare_share: float = 1 / 64
    rate: float = 1.0
    sigma: float = SIGMA
    repair: float = 1.0
    shocks: bool = True
    evictions_per_hour: int | None = None
    reset_s: float = 900.0
    transients_per_node_day: float = 0.05
    model: RecoveryModel = field(default_factory=RecoveryModel)


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    nodes: int
    spares: int
    days: float
    failures: tuple[Failure, ...]
    ratio: float
    stops: int
    lost: dict[str, float]
    false_evictions: int
    spares_used: int
    evictions: int
    breaker_resets: int
    transients: int
    regroups: Sequence[Regrouped]

    def repriced(self, before: RecoveryModel, after: RecoveryModel) -> float:
        """The ratio where the same decisions cost what ``after`` says. Overlaps of failures are taken as they were."""
        total_s = self.days * 86400.0 * self.nodes
        more_s = sum((price(after, r) - price(before, r)) * self.nodes for r in self.regroups)
        more_s += self.stops * (after.seen_s - before.seen_s + (after.step_s - before.step_s) / 2) * self.nodes
        return self.ratio - more_s / total_s


def price(model: RecoveryModel, regrouped: Regrouped) -> float:
    """Seconds that a regrouping holds the job up."""
    cost = model.boundary_s if regrouped.at_boundary else model.regroup_s
    return cost(regrouped.nodes, regrouped.newcomers)


def site_policy(nodes: int, assumptions: Assumptions) -> CorePolicy:
    """The production policy, with a budget for the size of the fleet.

    Commits and comparisons of ranks' speed are made rare: nothing here depends on them, and playing them would take
    longer than the rest.
    """
    allowed = assumptions.evictions_per_hour
    if allowed is None:
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
    failures = schedule(
        nodes + spares, hours, rng, rate=assumptions.rate, sigma=assumptions.sigma, shocks=assumptions.shocks
    )
    plan = FleetPlan(
        nodes=nodes,
        spares=spares,
        hours=hours,
        reset_s=assumptions.reset_s,
        transients_per_node_day=assumptions.transients_per_node_day,
        repair=assumptions.repair,
    )
    days = FleetDays(plan, failures, site_policy(nodes, assumptions), assumptions.model, SEED)
    days.run(on_progress)
    return Outcome(
        nodes=nodes,
        spares=spares,
        days=assumptions.days,
        failures=tuple(failures),
        ratio=days.accounts.ratio(),
        stops=days.accounts.stops,
        lost=days.accounts.gpu_hours_lost(GPUS_PER_NODE),
        false_evictions=len(days.false_evictions),
        spares_used=spares - days.least_spares,
        evictions=days.counts["verdict.evict"],
        breaker_resets=days.counts["breaker resets"],
        transients=days.counts["agent_restart"] + days.counts["network_blip"],
        regroups=days.regroups,
    )


DECIDING = ("sensor_s", "peers_notice_s", "digest_interval_s")
"""Fields of the recovery model on which it depends when something is decided: another value is played again."""


def repricings(model: RecoveryModel) -> dict[str, RecoveryModel]:
    """One assumption of the recovery model changed at a time: what is published or feared, then each field halved and
    doubled."""
    changed = {
        "communicators as MegaScale publishes (2.4e-3 s a rank)": replace(model, meet_s_per_rank=2.4e-3),
        "communicators ten times faster": replace(model, meet_s_per_rank=1e-5),
        "40 GB of state a GPU": replace(model, state_bytes_per_gpu=40e9),
        "network cards at a quarter": replace(model, nic_bytes_per_s=model.nic_bytes_per_s / 4),
        "controller's network at a tenth": replace(model, controller_bytes_per_s=model.controller_bytes_per_s / 10),
        "spares without a warm process (30 s)": replace(model, activate_s=30.0),
        "a step takes 20 s": replace(model, step_s=20.0),
        "a death is seen by the end of a socket": replace(model, seen_s=model.seen_by_socket_s),
        "a death is seen after 10 s": replace(model, seen_s=10.0),
    }
    for model_field in fields(model):
        if model_field.name not in DECIDING:
            value = getattr(model, model_field.name)
            changed[f"{model_field.name} halved, {value / 2:.3g}"] = replace(model, **{model_field.name: value / 2})
            changed[f"{model_field.name} doubled, {2 * value:.3g}"] = replace(model, **{model_field.name: 2 * value})
    return changed


def replays(assumptions: Assumptions) -> dict[str, Assumptions]:
    """Assumptions that change what is decided: played again."""
    slower = {
        f"{name} ten times as long": replace(
            assumptions, model=replace(assumptions.model, **{name: 10 * getattr(assumptions.model, name)})
        )
        for name in DECIDING
    }
    return {
        "no spares": replace(assumptions, spare_share=0.0),
        "half the spares": replace(assumptions, spare_share=assumptions.spare_share / 2),
        "four times the spares": replace(assumptions, spare_share=assumptions.spare_share * 4),
        "failures twice as often": replace(assumptions, rate=2.0),
        "all nodes alike (no lemons)": replace(assumptions, sigma=0.0),
        "repairs twice as long": replace(assumptions, repair=2.0),
        "shocks that take one node each": replace(assumptions, shocks=False),
        "four evictions an hour, breaker reset after 8 h": replace(assumptions, evictions_per_hour=4, reset_s=8 * 3600),
        "ten times as many short absences": replace(assumptions, transients_per_node_day=0.5),
        **slower,
    }
