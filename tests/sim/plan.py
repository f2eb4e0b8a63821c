"""What a seed means: a fleet, its jobs, its policy, and every fault that will strike, known before the world begins.

The faults are a list, so that a failure can be shortened by leaving some out: ``--faults 3,7`` plays those alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.failures import frailties, load
from controller.core.events import OperatorAction
from controller.core.policy import CorePolicy
from controller.core.rules import Rulebook
from controller.rulebook import shipped_rulebook
from everstep.vocabulary import Action, FindingKind, Mode
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import JobSpec, SpillPlan

FAULTS_BEGIN_S = 12.0
FAULTS_END_S = 90.0


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
class Fault:
    """``kind`` is a method of ``tests.sim.mischief.Mischief``; the rest are its arguments."""

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    detail: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        words = [f"{self.at:7.2f} {self.kind}", self.target, self.detail]
        numbers = [f"{self.seconds:.1f} s" if self.seconds else "", f"{self.value:g}" if self.value else ""]
        return " ".join(word for word in (*words, *numbers) if word)


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
    faults = _faults(rng, plan)
    apart = random.Random(seed ^ 0xCAFE)  # worlds whose jobs keep nothing besides are what they were
    plan = _with_protection(apart, plan)
    if any(job.spec.spill is not None or job.spec.parity for job in plan.jobs):
        faults += _faults_of_keeping(apart, plan)
    faults += _faults_of_blame(random.Random(seed ^ 0xB1A3E), plan)
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
    if any(job.spec.parity for job in jobs) and rng.random() < 0.8:
        machines = tuple(
            MachinePlan(m.name, Domain(rack=f"rack-{m.name}"), m.clock_rate, m.clock_offset_s) for m in machines
        )
    policy = msgspec.structs.replace(plan.policy, protect_interval_s=rng.choice((0.5, 10.0)))
    return Plan(**{**plan.__dict__, "jobs": jobs, "machines": machines, "policy": policy})


def _protected(rng: random.Random, job: JobPlan) -> JobPlan:
    spec = job.spec
    if rng.random() < 0.3:
        plan = SpillPlan(every=rng.choice((4, 12)), to="/checkpoints", keep=rng.choice((0, 1, 2)))
        spec = msgspec.structs.replace(spec, spill=plan)
    if spec.max_nodes >= 4 and rng.random() < 0.5:
        spec = msgspec.structs.replace(spec, parity=rng.choice((2, 3, 4)))
        if rng.random() < 0.6:  # in place of copies
            spec = msgspec.structs.replace(spec, replicas=1, min_nodes=max(4, spec.min_nodes))
    return JobPlan(**{**job.__dict__, "spec": spec})


def _policy(rng: random.Random) -> CorePolicy:
    """The lab's, with everything that takes long taking seconds: rules, remedies and memories of offences too."""
    return msgspec.structs.replace(
        CorePolicy.lab(),
        rules=_quick_rules(),
        remediate=rng.choice((Mode.RECOMMEND, Mode.ENFORCE, Mode.ENFORCE)),
        correlated_patience_s=8.0,
        resume_deadline_s=12.0,
        resume_deadline_max_s=24.0,
        growth_interval_s=rng.choice((1.0, 3.0)),
        take_after_s=4.0,
        rank_flap_count=rng.choice((4, 30)),
        flap_window_s=30.0,
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
        remedy_timeout_s=50.0,  # as the shipped one, with minutes turned into seconds; see PATIENCE_S
        remedy_settle_s=4.0,
        remedies_per_node=rng.choice((1, 3)),
        remedy_node_window_s=60.0,
        remedies_per_fleet=rng.choice((1, 10)),
        remedy_fleet_window_s=20.0,
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
                repeat_s=60.0,
                correlated_s=rule.correlated_s / 20,
            )
            for rule in rules
        )
        for kind, rules in shipped_rulebook().kinds.items()
    }
    return Rulebook(kinds)


# --- faults ------------------------------------------------------------------------------------------------------


class _Draw:
    """Draws one fault of each kind."""

    def __init__(self, rng: random.Random, plan: Plan) -> None:
        self.rng = rng
        self.plan = plan
        self.nodes = [machine.name for machine in plan.machines]
        self._frailty = frailties(len(self.nodes), rng)
        self._causes = load()

    def node(self) -> str:
        return self.rng.choices(self.nodes, weights=self._frailty)[0]

    def seat(self) -> str:
        """A node that computes, as a rule: one of those that a job takes first."""
        job = self.rng.choice(self.plan.jobs)
        return self.rng.choice(job.nodes[: job.spec.max_nodes])

    def controller(self) -> str:
        return self.rng.choice(self.plan.controllers).name

    def moment(self) -> float:
        return self.rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S)

    def fault(self, kind: str, target: str = "", least_s: float = 0.0, most_s: float = 0.0, **more: object) -> Fault:
        seconds = self.rng.uniform(least_s, most_s) if most_s else 0.0
        return Fault(self.moment(), kind, target, seconds, **more)  # type: ignore[arg-type]

    def by_the_table(self) -> Fault:
        """A cause by its published rate, as it shows on a machine."""
        cause = self.rng.choices(self._causes, weights=[cause.per_gpu_hour for cause in self._causes])[0]
        return self._shows_as()[cause.name](self)

    @staticmethod
    def _shows_as() -> dict[str, Callable[[_Draw], Fault]]:
        return {
            "faulty_gpu": lambda d: d.finding(FindingKind.GPU_LOST, Action.REPAIR),
            "hbm3": lambda d: d.finding(FindingKind.GPU_ECC_UNCORRECTABLE, Action.RESET_GPU),
            "software_bug": lambda d: d.fault("kill_rank", d.node()),
            "network_switch_or_cable": lambda d: d.fault("cut_rack", d.node(), 1.0, 20.0),
            "host_maintenance": lambda d: d.fault("reboot_rack", d.node()),
            "gpu_sram": lambda d: d.finding(FindingKind.GPU_ROW_REMAP_FAILURE, Action.REPAIR),
            "gsp": lambda d: d.finding(FindingKind.GPU_XID, Action.REBOOT_NODE),
            "nic": lambda d: d.fault("lose_network", d.node(), 3.0, 30.0),
            "nccl_watchdog_timeout": lambda d: d.fault("stop_rank", d.node(), 1.0, 15.0),
            "silent_data_corruption": lambda d: d.fault("compute_wrongly", d.node()),
            "thermal": lambda d: d.finding(FindingKind.GPU_TEMPERATURE, Action.DRAIN),
            "host_parts": lambda d: d.fault("lose_power", d.node(), 4.0, 30.0),
        }

    def finding(self, kind: FindingKind, action: Action, most_s: float = 30.0) -> Fault:
        return self.fault("sense", self.node(), 2.0, most_s, detail=f"{kind}:{action}")

    def odd_order(self) -> Fault:
        action = self.rng.choice([action for action in OperatorAction if action is not OperatorAction.MAINTENANCE])
        target = self.rng.choice(self.plan.jobs).name if "job" in action else self.node()
        if action is OperatorAction.STOP_JOB and self.rng.random() < 0.8:
            action = OperatorAction.RESIZE_JOB
        return self.fault("order", target, detail=str(action), value=float(self.rng.randint(1, 6)))


_MOMENTS = ("wanted", "begun", "asked", "ended")
_THEN = ("", "and the agent dies")
_ACTIONS = (Action.RESET_GPU, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)

_KINDS: tuple[tuple[float, Callable[[_Draw], Fault]], ...] = (
    (8.0, _Draw.by_the_table),
    (4.0, lambda d: d.finding(FindingKind.GPU_XID, d.rng.choice(_ACTIONS), 60.0)),
    (2.0, lambda d: d.fault("kill_rank", d.node())),
    (1.0, lambda d: d.fault("stop_rank", d.node(), 0.5, 20.0)),
    (1.0, lambda d: d.fault("kill_launcher", d.node())),
    (2.0, lambda d: d.fault("kill_agent", d.node())),
    (0.4, lambda d: d.fault("fail_disk", d.node())),
    (1.0, lambda d: d.fault("freeze", d.node(), 0.5, 25.0)),
    (2.0, lambda d: d.fault("lose_power", d.seat(), 2.0, 20.0)),
    (0.5, lambda d: d.fault("lose_rack", d.node(), 4.0, 15.0)),
    (1.0, lambda d: d.fault("slow_down", d.node(), 3.0, 20.0, value=d.rng.uniform(1.5, 6.0))),
    (2.0, lambda d: d.fault("compute_wrongly", d.seat())),
    (1.0, lambda d: d.fault("fill_memory", d.node(), 5.0, 30.0)),
    (0.7, lambda d: d.fault("fail_probes", d.node(), 5.0, 30.0)),
    (1.0, lambda d: d.fault("rot_slots", d.node())),
    (2.0, lambda d: d.fault("reset_connections", d.node())),
    (1.5, lambda d: d.fault("delay_connection", d.node(), detail=d.rng.choice(_THEN), value=d.rng.uniform(0.5, 12.0))),
    (1.5, lambda d: d.fault("mute", d.node(), 0.5, 15.0)),
    (1.5, lambda d: d.fault("deafen", d.node(), 0.5, 15.0)),
    (1.0, lambda d: d.fault("cut_pair", d.node(), 1.0, 12.0, detail=d.node())),
    (0.7, lambda d: d.fault("cut_controller", d.controller(), 0.5, 12.0)),
    (1.0, lambda d: d.fault("slow_links", d.node(), 2.0, 15.0, value=d.rng.uniform(0.05, 1.0))),
    (0.7, lambda d: d.fault("lose_packets", "", 2.0, 15.0, value=d.rng.uniform(0.05, 0.4))),
    (2.5, lambda d: d.fault("crash_controller", d.controller())),
    (1.5, lambda d: d.fault("crash_at_remedy", detail=d.rng.choice(_MOMENTS))),
    (1.0, lambda d: d.fault("pause_at_remedy", "", 3.0, 15.0, detail=d.rng.choice(_MOMENTS))),
    (1.0, lambda d: d.fault("pause_controller", d.controller(), 0.5, 10.0)),
    (1.0, lambda d: d.fault("fail_write", detail=d.rng.choice(("before", "after")))),
    (0.7, lambda d: d.fault("database_away", "", 0.3, 60.0)),
    (0.7, lambda d: d.fault("slow_database", "", 1.0, 10.0, value=d.rng.uniform(0.05, 1.5))),
    (1.0, lambda d: d.fault("jump_clock", d.rng.choice((d.node(), d.controller())), value=d.rng.uniform(-90, 90))),
    (3.0, _Draw.odd_order),
    (0.3, lambda d: d.fault("evict_everybody")),
    (0.4, lambda d: d.fault("maintain_rack", d.node(), 5.0, 20.0)),
    (1.0, lambda d: d.fault("maintenance_window", d.node(), 5.0, 20.0, detail=d.rng.choice(("", "gpu.xid:reset_gpu")))),
    (1.0, lambda d: d.fault("cordon", d.node(), 3.0, 20.0)),
    (0.7, lambda d: d.fault("scheduler_away", "", 1.0, 20.0)),
    (0.5, lambda d: d.fault("slow_scheduler", "", 2.0, 20.0, value=d.rng.uniform(0.2, 3.0))),
)


_OF_KEEPING: tuple[Callable[[_Draw], Fault], ...] = (
    lambda d: d.fault("kill_vault", d.seat()),
    lambda d: d.fault("lose_power", d.seat(), 2.0, 20.0),
    lambda d: d.fault("rot_slots", d.seat()),
    lambda d: d.fault("fill_memory", d.seat(), 5.0, 30.0),
    lambda d: d.fault("storage_away", "", 1.0, 20.0),
    lambda d: d.fault("storage_refuses", "", 1.0, 20.0),
    lambda d: d.fault("storage_lists_late", "", 3.0, 30.0),
    lambda d: d.fault("slow_storage", "", 3.0, 30.0, value=d.rng.uniform(0.5, 6.0)),
)


def _faults_of_keeping(rng: random.Random, plan: Plan) -> list[Fault]:
    draw = _Draw(rng, plan)
    return [rng.choice(_OF_KEEPING)(draw) for _ in range(rng.randint(0, 5))]


_ENDS = ("", "one", "other", "both")
_OF_BLAME: tuple[Callable[[_Draw], Fault], ...] = (
    lambda d: d.fault("sense_everywhere", "", 3.0, 25.0, detail=d.rng.choice(_ACTIONS), value=d.rng.uniform(0.0, 4.0)),
    lambda d: d.fault("blame_pair", f"{d.node()} {d.node()}", 6.0, 20.0, detail=d.rng.choice(_ENDS)),
    lambda d: d.finding(FindingKind.GPU_XID, Action.RESTART_RANK),
    lambda d: d.fault("slow_down", d.seat(), 25.0, 40.0, value=d.rng.uniform(4.0, 8.0)),
)


def _faults_of_blame(rng: random.Random, plan: Plan) -> list[Fault]:
    """In a quarter of the worlds: what many show at once, what two have a part in, and who is slow."""
    draw = _Draw(rng, plan)
    return [rng.choice(_OF_BLAME)(draw) for _ in range(rng.randint(1, 3))] if rng.random() < 0.25 else []


def _faults(rng: random.Random, plan: Plan) -> list[Fault]:
    draw = _Draw(rng, plan)
    weights = [weight for weight, _ in _KINDS]
    faults = [rng.choices(_KINDS, weights=weights)[0][1](draw) for _ in range(rng.randint(2, 14))]
    if faults and rng.random() < 0.3:  # troubles come together
        moment = draw.moment()
        faults = [Fault(**{**f.__dict__, "at": moment + rng.uniform(0, 2.0)}) for f in faults]
    return faults
