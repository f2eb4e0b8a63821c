"""The faults of a plan: what may break, how often, and for how long."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep_controller.core.events import OperatorAction

from bench.failures import frailties, load
from everstep.vocabulary import Action, FindingKind

if TYPE_CHECKING:
    from tests.sim.plan import Plan

FAULTS_BEGIN_S = 12.0
FAULTS_END_S = 90.0


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


_MOMENTS = ("requested", "started", "asked", "ended")
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


def of_keeping(rng: random.Random, plan: Plan) -> list[Fault]:
    draw = _Draw(rng, plan)
    return [rng.choice(_OF_KEEPING)(draw) for _ in range(rng.randint(0, 5))]


_ENDS = ("", "one", "other", "both")
_OF_BLAME: tuple[Callable[[_Draw], Fault], ...] = (
    lambda d: d.fault("sense_everywhere", "", 3.0, 25.0, detail=d.rng.choice(_ACTIONS), value=d.rng.uniform(0.0, 4.0)),
    lambda d: d.fault("blame_pair", f"{d.node()} {d.node()}", 6.0, 20.0, detail=d.rng.choice(_ENDS)),
    lambda d: d.finding(FindingKind.GPU_XID, Action.RESTART_RANK),
    lambda d: d.fault("slow_down", d.seat(), 25.0, 40.0, value=d.rng.uniform(4.0, 8.0)),
)


def of_blame(rng: random.Random, plan: Plan) -> list[Fault]:
    """In a quarter of the worlds: what many show at once, what two have a part in, and who is slow."""
    draw = _Draw(rng, plan)
    return [rng.choice(_OF_BLAME)(draw) for _ in range(rng.randint(1, 3))] if rng.random() < 0.25 else []


def of_return(rng: random.Random, plan: Plan) -> list[Fault]:
    """In an eighth of the worlds: what many show while they are on their way back, in their seats or outside."""
    draw = _Draw(rng, plan)
    if rng.random() >= 0.125:
        return []
    how = rng.choice(("cordoned", "without power"))
    action = rng.choice(_ACTIONS)
    return [draw.fault("sense_on_return", how, 6.0, 12.0, detail=action, value=rng.uniform(0.0, 4.0))]


_CUTS = ("both", "towards it", "from it")


def of_leaders(rng: random.Random, plan: Plan) -> list[Fault]:
    """In an eighth of the worlds with several controllers: the one that leads reaches the database, and no node."""
    draw = _Draw(rng, plan)
    if rng.random() >= 0.125 or len(plan.controllers) < 2:
        return []
    return [draw.fault("cut_leader", "", 30.0, 45.0, detail=rng.choice(_CUTS))]


_APART = (
    (FindingKind.GPU_LOST, Action.REPAIR),
    (FindingKind.GPU_ECC_UNCORRECTABLE, Action.RESET_GPU),
    (FindingKind.HOST_KERNEL, Action.REBOOT_NODE),
    (FindingKind.GPU_ROW_REMAP_FAILURE, Action.REPAIR),
    (FindingKind.GPU_RECOVERY_ACTION, Action.RESET_GPU),
    (FindingKind.GPU_RETIRED_PAGES, Action.REPAIR),
)


def of_breaker(rng: random.Random, plan: Plan) -> list[Fault]:
    """In a few worlds: more nodes fall ill than the fleet may lose, each of something else, and some again when the
    window of its budget has passed."""
    if rng.random() >= 0.04:
        return []
    nodes = [machine.name for machine in plan.machines]
    found = []
    for at in (FAULTS_BEGIN_S + 2.0, FAULTS_BEGIN_S + 6.0 + plan.policy.eviction_window_s):
        rng.shuffle(nodes)
        ills = rng.sample(_APART, min(len(nodes), len(_APART)))
        for place, (kind, action) in enumerate(ills):
            found.append(Fault(at + place, "sense", nodes[place], 12.0, f"{kind}:{action}"))
    return found


def of_audits(rng: random.Random, plan: Plan) -> list[Fault]:
    """Where training is audited: a GPU that computes wrongly, an auditor that does, or both on different machines."""
    draw = _Draw(rng, plan)
    kinds = rng.choice((("compute_wrongly",), ("audit_wrongly",), ("compute_wrongly", "audit_wrongly")))
    return [draw.fault(kind, draw.seat()) for kind in kinds]


def of_all_kinds(rng: random.Random, plan: Plan) -> list[Fault]:
    draw = _Draw(rng, plan)
    weights = [weight for weight, _ in _KINDS]
    faults = [rng.choices(_KINDS, weights=weights)[0][1](draw) for _ in range(rng.randint(2, 14))]
    if faults and rng.random() < 0.3:  # troubles come together
        moment = draw.moment()
        faults = [Fault(**{**f.__dict__, "at": moment + rng.uniform(0, 2.0)}) for f in faults]
    return faults


def of_pace(rng: random.Random, plan: Plan) -> list[Fault]:
    """Who is slow for long enough to be told from a bad moment: one, some or all; one time after the other."""
    found = []
    for at in (FAULTS_BEGIN_S + 8.0, FAULTS_BEGIN_S + 38.0, FAULTS_BEGIN_S + 68.0)[: rng.randint(1, 3)]:
        job = rng.choice(plan.jobs)
        seats = job.nodes[: job.spec.max_nodes]
        count = rng.choice((1, 1, 1, min(2, len(seats)), len(seats)))
        who = " ".join(rng.sample(seats, count))
        found.append(
            Fault(at + rng.uniform(0.0, 2.0), "slow_down", who, rng.uniform(14.0, 18.0), "", rng.uniform(3.2, 4.0))
        )
    return found
