"""Make a plan from a seed: a fleet, its jobs, its policy, and all faults, before the world begins.

Faults have numbers, so that a failure can be reduced to some of them: ``--faults 3,7`` plays those alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from everstep.vocabulary import FindingKind, Mode
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import JobSpec, SpillPlan
from everstep_controller.core.policy import CorePolicy, Rulebook
from everstep_controller.policy.rulebook import shipped_rulebook
from tests.sim.faults.kinds import (
    Fault,
    audit_faults,
    blame_faults,
    breaker_faults,
    checkpoint_faults,
    common_faults,
    leader_faults,
    return_faults,
    straggler_faults,
)
from tests.sim.faults.maintenance import PLANNED_MAINTENANCE_SHARE, maintenance_faults
from tests.sim.faults.topology import TOPOLOGY_SHARE, topology_faults, with_topology

AUDITED_SHARE = 0.2
"""Share of the worlds in which ranks audit each other's work."""
STRAGGLER_SHARE = 0.15
"""Share of the worlds in which slow nodes are found within seconds."""


@dataclass(frozen=True)
class JobPlan:
    """A job of the plan.

    Attributes:
        nodes: The nodes on which its launchers run.
        step_s: Seconds of a step when no node is slow.
        replicated: Whether all ranks hold equal parameters and compare digests. Otherwise each holds a shard.
        last_step: The step after which the job is finished; None if it never ends.
    """

    name: str
    spec: JobSpec
    nodes: tuple[str, ...]
    step_s: float
    replicated: bool
    last_step: int | None


@dataclass(frozen=True)
class MachinePlan:
    """The host of a node or of a controller. Its clock has a rate and an offset."""

    name: str
    domain: Domain
    clock_rate: float
    clock_offset_s: float


@dataclass(frozen=True)
class Plan:
    """A world.

    Attributes:
        faults: The faults to inject, each with its number in the whole list.
        loss: Share of packets that the network loses.
        delay_s: Mean seconds that a frame takes on its way.
    """

    seed: int
    machines: tuple[MachinePlan, ...]
    controllers: tuple[MachinePlan, ...]
    jobs: tuple[JobPlan, ...]
    policy: CorePolicy
    faults: tuple[tuple[int, Fault], ...]
    loss: float
    delay_s: float

    def only(self, numbers: list[int]) -> Plan:
        """Return the same world with the faults of these numbers alone."""
        return _with_faults(self, tuple(pair for pair in self.faults if pair[0] in set(numbers)))


def _with_faults(plan: Plan, faults: tuple[tuple[int, Fault], ...]) -> Plan:
    return Plan(**{**plan.__dict__, "faults": faults})


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed, which is the same on every machine."""
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
    faults = common_faults(rng, plan)
    # Each optional part has its own generator, so that worlds without it stay the same.
    protection_rng = random.Random(seed ^ 0xCAFE)
    plan = _with_protection(protection_rng, plan)
    if any(job.spec.spill is not None or job.spec.parity_group_size for job in plan.jobs):
        faults += checkpoint_faults(protection_rng, plan)
    faults += blame_faults(random.Random(seed ^ 0xB1A3E), plan)
    faults += return_faults(random.Random(seed ^ 0x2E70), plan)
    faults += leader_faults(random.Random(seed ^ 0xDEAF), plan)
    faults += breaker_faults(random.Random(seed ^ 0xB125), plan)
    audit_rng = random.Random(seed ^ 0xA0D17)
    if audit_rng.random() < AUDITED_SHARE:
        plan = _with_audits(audit_rng, plan)
        faults += audit_faults(audit_rng, plan)
    straggler_rng = random.Random(seed ^ 0x5200)
    if straggler_rng.random() < STRAGGLER_SHARE:
        plan = _with_stragglers(straggler_rng, plan)
        faults = straggler_faults(straggler_rng, plan) + (faults if straggler_rng.random() < 0.5 else [])
    topology_rng = random.Random(seed ^ 0x7E88A)
    if topology_rng.random() < TOPOLOGY_SHARE:
        plan = with_topology(topology_rng, plan)
        faults += topology_faults(topology_rng, plan)
    maintenance_rng = random.Random(seed ^ 0x09EE9)
    if maintenance_rng.random() < PLANNED_MAINTENANCE_SHARE:
        faults += maintenance_faults(maintenance_rng, plan)
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
    last_step = rng.randint(40, 120) if rng.random() < 0.1 else None
    return JobPlan(name, spec, tuple(nodes), rng.choice((0.4, 0.7, 1.2)), replicated, last_step)


def _with_protection(rng: random.Random, plan: Plan) -> Plan:
    """Let some jobs ask for parity or for checkpoints on storage. Parity needs nodes in different racks."""
    jobs = tuple(_protected(rng, job) for job in plan.jobs)
    machines = plan.machines
    if any(job.spec.parity_group_size for job in jobs) and rng.random() < 0.8:
        machines = tuple(
            MachinePlan(m.name, Domain(rack=f"rack-{m.name}"), m.clock_rate, m.clock_offset_s) for m in machines
        )
    policy = plan.policy.with_values(checkpoints={"parity_interval_s": rng.choice((0.5, 10.0))})
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
    """Audit all jobs, with strikes that expire within the time of a world."""
    jobs = tuple(
        JobPlan(**{**job.__dict__, "spec": msgspec.structs.replace(job.spec, sdc="standard")}) for job in plan.jobs
    )
    policy = plan.policy.with_values(
        audits={"strike_window_s": rng.choice((30.0, 7 * 86400.0)), "candidate_max_s": rng.choice((15.0, 3600.0))}
    )
    return Plan(**{**plan.__dict__, "jobs": jobs, "policy": policy})


def _with_stragglers(rng: random.Random, plan: Plan) -> Plan:
    """Find stragglers within seconds. In half of these worlds the rule evicts them."""
    kinds = dict(plan.policy.rules.rules_by_kind)
    mode = rng.choice((Mode.RECOMMEND, Mode.ENFORCE))
    kinds[FindingKind.RANK_STRAGGLER] = tuple(
        msgspec.structs.replace(rule, mode=mode) for rule in kinds[FindingKind.RANK_STRAGGLER]
    )
    stragglers = {"window_s": 1.0, "windows": 5, "count": 4, "replace": rng.random() < 0.5}
    policy = msgspec.structs.replace(plan.policy.with_values(stragglers=stragglers), rules=Rulebook(kinds))
    return Plan(**{**plan.__dict__, "policy": policy})


def _policy(rng: random.Random) -> CorePolicy:
    """Return the lab's policy with minutes turned into seconds, also in rules, remediations and offender scores."""
    mode = rng.choice((Mode.RECOMMEND, Mode.ENFORCE, Mode.ENFORCE))
    policy = CorePolicy.lab_preset().with_values(
        correlated_silence={"max_s": 8.0},
        jobs={"growth_interval_s": rng.choice((1.0, 3.0)), "preempt_after_s": 4.0},
        regroups={
            "resume_deadline_s": 12.0,
            "resume_deadline_max_s": 24.0,
            "rank_flap_count": rng.choice((4, 30)),
            "failure_window_s": 30.0,
        },
        budget={
            "count": rng.choice((1, 2, 4)),
            "share": rng.choice((0.3, 1.0)),
            "rack_count": rng.choice((1, 2, 4)),
            "rack_share": rng.choice((0.5, 1.0)),
            "job_count": rng.choice((1, 2, 3)),
            "job_share": rng.choice((0.5, 1.0)),
            "window_s": rng.choice((20.0, 60.0)),
        },
        offenders={"wait_s": 3.0, "wait_max_s": 10.0, "half_life_s": 20.0},
        probes={"timeout_s": 6.0, "retry_max_s": 8.0, "partner_wait_s": 1.0},
        remediation={
            "mode": mode,
            "timeout_s": 50.0,  # well below RECOVERY_TIMEOUT_S
            "settle_s": 4.0,
            "per_node": rng.choice((1, 3)),
            "node_window_s": 60.0,
            "per_fleet": rng.choice((1, 10)),
            "fleet_window_s": 20.0,
        },
        findings={"quiet_s": 5.0},
    )
    return msgspec.structs.replace(policy, rules=_accelerated_rules())


def _accelerated_rules() -> Rulebook:
    """Return the shipped rules with minutes turned into seconds."""
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
