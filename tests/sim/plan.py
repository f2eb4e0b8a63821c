"""What a seed means: a fleet, its jobs, its policy, and every fault that will strike, known before the world begins.

The faults are a list, so that a failure can be shortened by leaving some out: ``--faults 3,7`` plays those alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
from everstep_controller.core.policy import CorePolicy, Rulebook
from everstep_controller.rulebook import shipped_rulebook

from everstep.vocabulary import FindingKind, Mode
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import JobSpec, SpillPlan
from tests.sim.faults import (
    Fault,
    of_all_kinds,
    of_audits,
    of_blame,
    of_breaker,
    of_keeping,
    of_leaders,
    of_pace,
    of_return,
)
from tests.sim.terrain import TERRAIN_SHARE, of_terrain, settle
from tests.sim.upkeep import UPKEEP_SHARE, of_upkeep

AUDITED_SHARE = 0.2
"""Of the worlds, in which ranks audit each other's work."""


@dataclass(frozen=True)
class JobPlan:
    """``replicated``: all ranks hold equal parameters and compare digests; else each holds a shard. ``until``: its last
    step."""

    name: str
    spec: JobSpec
    nodes: tuple[str, ...]
    step_s: float
    replicated: bool
    until: int | None


@dataclass(frozen=True)
class MachinePlan:
    name: str
    domain: Domain
    clock_rate: float
    clock_offset_s: float


@dataclass(frozen=True)
class Plan:
    """A world. ``faults`` are those that are played, with their places in the whole list."""

    seed: int
    machines: tuple[MachinePlan, ...]
    controllers: tuple[MachinePlan, ...]
    jobs: tuple[JobPlan, ...]
    policy: CorePolicy
    faults: tuple[tuple[int, Fault], ...]
    loss: float
    delay_s: float

    def only(self, places: list[int]) -> Plan:
        """The same world with these faults alone."""
        kept = tuple(pair for pair in self.faults if pair[0] in set(places))
        return _with_faults(self, kept)


def _with_faults(plan: Plan, faults: tuple[tuple[int, Fault], ...]) -> Plan:
    return Plan(**{**plan.__dict__, "faults": faults})


def make(seed: int) -> Plan:
    """The world of a seed; the same on every machine."""
    rng = random.Random(seed)
    machines = _machines(rng)
    names = [machine.name for machine in machines]
    jobs = _jobs(rng, names)
    controllers = tuple(
        MachinePlan(f"c{i + 1}", Domain(), 1.0 + rng.uniform(-2e-4, 2e-4), rng.uniform(-3.0, 3.0))
        for i in range(rng.choice((1, 2, 2, 3)))
    )
    plan = Plan(
        seed=seed,
        machines=machines,
        controllers=controllers,
        jobs=jobs,
        policy=_policy(rng),
        faults=(),
        loss=rng.choice((0.0, 0.0, 0.01, 0.05)),
        delay_s=rng.choice((0.0005, 0.002, 0.02)),
    )
    faults = of_all_kinds(rng, plan)
    apart = random.Random(seed ^ 0xCAFE)  # worlds whose jobs keep nothing besides are what they were
    plan = _with_protection(apart, plan)
    if any(job.spec.spill is not None or job.spec.parity_group_size for job in plan.jobs):
        faults += of_keeping(apart, plan)
    faults += of_blame(random.Random(seed ^ 0xB1A3E), plan)
    faults += of_return(random.Random(seed ^ 0x2E70), plan)
    faults += of_leaders(random.Random(seed ^ 0xDEAF), plan)
    faults += of_breaker(random.Random(seed ^ 0xB125), plan)
    audited = random.Random(seed ^ 0xA0D17)
    if audited.random() < AUDITED_SHARE:
        plan = _with_audits(audited, plan)
        faults += of_audits(audited, plan)
    paced = random.Random(seed ^ 0x5200)  # and so are those in which nobody is slow for long
    if paced.random() < 0.15:
        plan = _with_pace(paced, plan)
        faults = of_pace(paced, plan) + (faults if paced.random() < 0.5 else [])
    terrain = random.Random(seed ^ 0x7E88A)
    if terrain.random() < TERRAIN_SHARE:
        plan = settle(terrain, plan)
        faults += of_terrain(terrain, plan)
    upkeep = random.Random(seed ^ 0x09EE9)
    if upkeep.random() < UPKEEP_SHARE:
        faults += of_upkeep(upkeep, plan)
    return _with_faults(plan, tuple(enumerate(sorted(faults, key=lambda fault: fault.at))))


def _machines(rng: random.Random) -> tuple[MachinePlan, ...]:
    count = rng.randint(3, 9)
    racks = rng.randint(1, 3)
    return tuple(
        MachinePlan(
            f"n{i + 1}",
            Domain(rack=f"rack{i % racks}", switch=f"switch{i % racks}"),
            1.0 + rng.uniform(-2e-4, 2e-4),
            rng.uniform(-2.0, 2.0),
        )
        for i in range(count)
    )


def _jobs(rng: random.Random, names: list[str]) -> tuple[JobPlan, ...]:
    first = _job(rng, "a", names, rng.choice((2, rng.randint(2, len(names)), rng.randint(2, len(names)))))
    if len(names) < 5 or rng.random() < 0.7:
        return (first,)
    return (first, _job(rng, "b", names[::-1][: rng.randint(2, 4)], 2))


def _job(rng: random.Random, name: str, nodes: list[str], most: int) -> JobPlan:
    replicated = rng.random() < 0.6
    least = rng.randint(1, max(1, most - 1)) if replicated else rng.randint(min(2, most), max(min(2, most), most - 1))
    block = 2 if most >= 2 and (least, most) != (1, 1) and most - least >= 1 and rng.random() < 0.2 else 1
    spec = JobSpec(
        job=name,
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=rng.choice((1, 1, 2)),
        join_wait_s=4.0,
        replicas=2,
        digest_interval=rng.choice((1, 4)) if replicated else 0,
        hang_threshold_s=rng.choice((None, 5.0)),
        block_nodes=block,
        priority=rng.choice((0, 0, 5)),
    )
    until = rng.randint(40, 120) if rng.random() < 0.1 else None
    return JobPlan(name, spec, tuple(nodes), rng.choice((0.4, 0.7, 1.2)), replicated, until)


def _with_protection(rng: random.Random, plan: Plan) -> Plan:
    """Some jobs ask for parity or for checkpoints on storage. Parity takes nodes of which no two share a rack."""
    jobs = tuple(_protected(rng, job) for job in plan.jobs)
    machines = plan.machines
    if any(job.spec.parity_group_size for job in jobs) and rng.random() < 0.8:
        machines = tuple(
            MachinePlan(m.name, Domain(rack=f"rack-{m.name}"), m.clock_rate, m.clock_offset_s) for m in machines
        )
    policy = msgspec.structs.replace(plan.policy, parity_interval_s=rng.choice((0.5, 10.0)))
    return Plan(**{**plan.__dict__, "jobs": jobs, "machines": machines, "policy": policy})


def _protected(rng: random.Random, job: JobPlan) -> JobPlan:
    spec = job.spec
    if rng.random() < 0.3:
        plan = SpillPlan(every_steps=rng.choice((4, 12)), url="/checkpoints", keep_last=rng.choice((0, 1, 2)))
        spec = msgspec.structs.replace(spec, spill=plan)
    if spec.max_nodes >= 4 and rng.random() < 0.5:
        spec = msgspec.structs.replace(spec, parity_group_size=rng.choice((2, 3, 4)))
        if rng.random() < 0.6:  # in place of copies
            spec = msgspec.structs.replace(spec, replicas=1, min_nodes=max(4, spec.min_nodes))
    return JobPlan(**{**job.__dict__, "spec": spec})


def _with_audits(rng: random.Random, plan: Plan) -> Plan:
    """All jobs are audited, and strikes are forgiven within the time of a world."""
    jobs = tuple(
        JobPlan(**{**job.__dict__, "spec": msgspec.structs.replace(job.spec, sdc="standard")}) for job in plan.jobs
    )
    policy = msgspec.structs.replace(
        plan.policy,
        audit_strike_window_s=rng.choice((30.0, 7 * 86400.0)),
        audit_candidate_max_s=rng.choice((15.0, 3600.0)),
    )
    return Plan(**{**plan.__dict__, "jobs": jobs, "policy": policy})


def _with_pace(rng: random.Random, plan: Plan) -> Plan:
    """Who is slow is found within seconds, and in half of these worlds goes for it."""
    kinds = dict(plan.policy.rules.rules_by_kind)
    mode = rng.choice((Mode.RECOMMEND, Mode.ENFORCE))
    kinds[FindingKind.RANK_STRAGGLER] = tuple(
        msgspec.structs.replace(rule, mode=mode) for rule in kinds[FindingKind.RANK_STRAGGLER]
    )
    policy = msgspec.structs.replace(
        plan.policy,
        rules=Rulebook(kinds),
        straggler_window_s=1.0,
        straggler_windows=5,
        straggler_count=4,
        straggler_replace=rng.random() < 0.5,
    )
    return Plan(**{**plan.__dict__, "policy": policy})


def _policy(rng: random.Random) -> CorePolicy:
    """The lab's, with everything that takes long taking seconds: rules, remedies and memories of offences too."""
    return msgspec.structs.replace(
        CorePolicy.lab_preset(),
        rules=_quick_rules(),
        remediation_mode=rng.choice((Mode.RECOMMEND, Mode.ENFORCE, Mode.ENFORCE)),
        correlated_silence_max_s=8.0,
        resume_deadline_s=12.0,
        resume_deadline_max_s=24.0,
        growth_interval_s=rng.choice((1.0, 3.0)),
        preempt_after_s=4.0,
        rank_flap_count=rng.choice((4, 30)),
        job_failure_window_s=30.0,
        eviction_count=rng.choice((1, 2, 4)),
        eviction_share=rng.choice((0.3, 1.0)),
        eviction_rack_count=rng.choice((1, 2, 4)),
        eviction_rack_share=rng.choice((0.5, 1.0)),
        eviction_job_count=rng.choice((1, 2, 3)),
        eviction_job_share=rng.choice((0.5, 1.0)),
        eviction_window_s=rng.choice((20.0, 60.0)),
        offender_wait_s=3.0,
        offender_wait_max_s=10.0,
        offender_half_life_s=20.0,
        probe_timeout_s=6.0,
        probe_retry_max_s=8.0,
        partner_wait_s=1.0,
        remediation_timeout_s=50.0,  # as the shipped one, with minutes turned into seconds; see PATIENCE_S
        remediation_settle_s=4.0,
        remediations_per_node=rng.choice((1, 3)),
        remediation_node_window_s=60.0,
        remediations_per_fleet=rng.choice((1, 10)),
        remediation_fleet_window_s=20.0,
        finding_quiet_s=5.0,
    )


def _quick_rules() -> Rulebook:
    """The shipped rules with minutes turned into seconds."""
    kinds = {
        kind: tuple(
            msgspec.structs.replace(
                rule,
                clear_s=rule.clear_s / 60,
                boot_grace_s=rule.boot_grace_s / 60,
                step_memory_s=60.0,
                correlated_s=rule.correlated_s / 20,
            )
            for rule in rules
        )
        for kind, rules in shipped_rulebook().rules_by_kind.items()
    }
    return Rulebook(kinds)
