"""The kinds of faults, with their frequencies and durations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.failures import frailties, load
from everstep.vocabulary import Action, FindingKind
from everstep_controller.core.events import OperatorAction

if TYPE_CHECKING:
    from tests.sim.faults.plan import Plan

FAULTS_BEGIN_S = 12.0
"""Seconds at which the first fault may begin."""
FAULTS_END_S = 90.0
"""Seconds at which the last fault may begin."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        at: Seconds of the world at which it begins.
        kind: A method of ``tests.sim.faults.injector.FaultInjector``.
        target: The name of a machine, a controller or a job.
        seconds: Its duration.
        detail: A further argument of the method.
        value: A further number for the method.
    """

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    detail: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        names = [f"{self.at:7.2f} {self.kind}", self.target, self.detail]
        numbers = [f"{self.seconds:.1f} s" if self.seconds else "", f"{self.value:g}" if self.value else ""]
        return " ".join(text for text in (*names, *numbers) if text)


class _FaultDraw:
    """Draw single faults for a plan."""

    def __init__(self, rng: random.Random, plan: Plan) -> None:
        self.rng = rng
        self.plan = plan
        self.nodes = [machine.name for machine in plan.machines]
        self._frailty = frailties(len(self.nodes), rng)
        self._causes = load()

    def node(self) -> str:
        """Draw a node. Some nodes fail more often than others."""
        return self.rng.choices(self.nodes, weights=self._frailty)[0]

    def seat(self) -> str:
        """Draw a node that probably computes: one of those that a job seats first."""
        job = self.rng.choice(self.plan.jobs)
        return self.rng.choice(job.nodes[: job.spec.max_nodes])

    def controller(self) -> str:
        """Draw a controller."""
        return self.rng.choice(self.plan.controllers).name

    def moment(self) -> float:
        """Draw the time of a fault."""
        return self.rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S)

    def fault(self, kind: str, target: str = "", least_s: float = 0.0, most_s: float = 0.0, **fields: object) -> Fault:
        """Draw the time and the duration of a fault."""
        seconds = self.rng.uniform(least_s, most_s) if most_s else 0.0
        return Fault(self.moment(), kind, target, seconds, **fields)  # type: ignore[arg-type]

    def published_cause(self) -> Fault:
        """Draw a cause by its published rate, and return the fault that it leads to."""
        cause = self.rng.choices(self._causes, weights=[cause.per_gpu_hour for cause in self._causes])[0]
        return self._fault_by_cause()[cause.name](self)

    @staticmethod
    def _fault_by_cause() -> dict[str, Callable[[_FaultDraw], Fault]]:
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
        """Draw the node and the duration of a finding."""
        return self.fault("raise_finding", self.node(), 2.0, most_s, detail=f"{kind}:{action}")

    def random_command(self) -> Fault:
        """Draw a command of an operator that the state of the fleet does not require."""
        action = self.rng.choice([action for action in OperatorAction if action is not OperatorAction.MAINTENANCE])
        target = self.rng.choice(self.plan.jobs).name if "job" in action else self.node()
        if action is OperatorAction.STOP_JOB and self.rng.random() < 0.8:
            action = OperatorAction.RESIZE_JOB
        return self.fault("operator_command", target, detail=str(action), value=float(self.rng.randint(1, 6)))


_REMEDIATION_MOMENTS = ("requested", "started", "sent", "ended")
"""Moments of a remediation at which the leader may die or pause."""
_AGENT_FATES = ("", "and the agent dies")
"""Whether the agent dies while frames of its connection are delayed."""
_XID_ACTIONS = (Action.RESET_GPU, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)
"""Actions that an XID asks for; a repeated one is more frequent."""

_COMMON_FAULTS: tuple[tuple[float, Callable[[_FaultDraw], Fault]], ...] = (
    (8.0, _FaultDraw.published_cause),
    (4.0, lambda d: d.finding(FindingKind.GPU_XID, d.rng.choice(_XID_ACTIONS), 60.0)),
    (2.0, lambda d: d.fault("kill_rank", d.node())),
    (1.0, lambda d: d.fault("stop_rank", d.node(), 0.5, 20.0)),
    (1.0, lambda d: d.fault("kill_launcher", d.node())),
    (2.0, lambda d: d.fault("kill_agent", d.node())),
    (0.4, lambda d: d.fault("fail_disk", d.node())),
    (1.0, lambda d: d.fault("freeze", d.node(), 0.5, 25.0)),
    (2.0, lambda d: d.fault("lose_power", d.seat(), 2.0, 20.0)),
    (0.5, lambda d: d.fault("lose_rack_power", d.node(), 4.0, 15.0)),
    (1.0, lambda d: d.fault("slow_down", d.node(), 3.0, 20.0, value=d.rng.uniform(1.5, 6.0))),
    (2.0, lambda d: d.fault("compute_wrongly", d.seat())),
    (1.0, lambda d: d.fault("fill_vault", d.node(), 5.0, 30.0)),
    (0.7, lambda d: d.fault("fail_probes", d.node(), 5.0, 30.0)),
    (1.0, lambda d: d.fault("corrupt_slot", d.node())),
    (2.0, lambda d: d.fault("reset_connections", d.node())),
    (
        1.5,
        lambda d: d.fault(
            "delay_connection", d.node(), detail=d.rng.choice(_AGENT_FATES), value=d.rng.uniform(0.5, 12.0)
        ),
    ),
    (1.5, lambda d: d.fault("cut_to_controllers", d.node(), 0.5, 15.0)),
    (1.5, lambda d: d.fault("cut_from_controllers", d.node(), 0.5, 15.0)),
    (1.0, lambda d: d.fault("cut_pair", d.node(), 1.0, 12.0, detail=d.node())),
    (0.7, lambda d: d.fault("cut_controller", d.controller(), 0.5, 12.0)),
    (1.0, lambda d: d.fault("slow_links", d.node(), 2.0, 15.0, value=d.rng.uniform(0.05, 1.0))),
    (0.7, lambda d: d.fault("lose_packets", "", 2.0, 15.0, value=d.rng.uniform(0.05, 0.4))),
    (2.5, lambda d: d.fault("crash_controller", d.controller())),
    (1.5, lambda d: d.fault("crash_at_remediation", detail=d.rng.choice(_REMEDIATION_MOMENTS))),
    (1.0, lambda d: d.fault("pause_at_remediation", "", 3.0, 15.0, detail=d.rng.choice(_REMEDIATION_MOMENTS))),
    (1.0, lambda d: d.fault("pause_controller", d.controller(), 0.5, 10.0)),
    (1.0, lambda d: d.fault("fail_write", detail=d.rng.choice(("before", "after")))),
    (0.7, lambda d: d.fault("stop_database", "", 0.3, 60.0)),
    (0.7, lambda d: d.fault("slow_database", "", 1.0, 10.0, value=d.rng.uniform(0.05, 1.5))),
    (1.0, lambda d: d.fault("jump_clock", d.rng.choice((d.node(), d.controller())), value=d.rng.uniform(-90, 90))),
    (3.0, _FaultDraw.random_command),
    (0.3, lambda d: d.fault("evict_all_nodes")),
    (0.4, lambda d: d.fault("reboot_drained_rack", d.node(), 5.0, 20.0)),
    (1.0, lambda d: d.fault("maintenance_window", d.node(), 5.0, 20.0, detail=d.rng.choice(("", "gpu.xid:reset_gpu")))),
    (1.0, lambda d: d.fault("cordon", d.node(), 3.0, 20.0)),
    (0.7, lambda d: d.fault("stop_scheduler", "", 1.0, 20.0)),
    (0.5, lambda d: d.fault("slow_scheduler", "", 2.0, 20.0, value=d.rng.uniform(0.2, 3.0))),
)
"""Weights and kinds of the faults that may occur in every world."""


_CHECKPOINT_FAULTS: tuple[Callable[[_FaultDraw], Fault], ...] = (
    lambda d: d.fault("kill_vault", d.seat()),
    lambda d: d.fault("lose_power", d.seat(), 2.0, 20.0),
    lambda d: d.fault("corrupt_slot", d.seat()),
    lambda d: d.fault("fill_vault", d.seat(), 5.0, 30.0),
    lambda d: d.fault("stop_storage", "", 1.0, 20.0),
    lambda d: d.fault("deny_storage", "", 1.0, 20.0),
    lambda d: d.fault("delay_listings", "", 3.0, 30.0),
    lambda d: d.fault("slow_storage", "", 3.0, 30.0, value=d.rng.uniform(0.5, 6.0)),
)
"""Faults of vaults and of storage."""


def checkpoint_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return faults of vaults and of storage."""
    draw = _FaultDraw(rng, plan)
    return [rng.choice(_CHECKPOINT_FAULTS)(draw) for _ in range(rng.randint(0, 5))]


_FAILING_ENDS = ("", "first", "second", "both")
"""Ends of a slow link at which probes fail."""
_BLAME_FAULTS: tuple[Callable[[_FaultDraw], Fault], ...] = (
    lambda d: d.fault(
        "raise_finding_everywhere", "", 3.0, 25.0, detail=d.rng.choice(_XID_ACTIONS), value=d.rng.uniform(0.0, 4.0)
    ),
    lambda d: d.fault("report_slow_link", f"{d.node()} {d.node()}", 6.0, 20.0, detail=d.rng.choice(_FAILING_ENDS)),
    lambda d: d.finding(FindingKind.GPU_XID, Action.RESTART_RANK),
    lambda d: d.fault("slow_down", d.seat(), 25.0, 40.0, value=d.rng.uniform(4.0, 8.0)),
)
"""Faults whose cause is hard to find."""


def blame_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return in a quarter of the worlds faults whose cause is hard to find: outbreaks, slow links and slow nodes."""
    draw = _FaultDraw(rng, plan)
    return [rng.choice(_BLAME_FAULTS)(draw) for _ in range(rng.randint(1, 3))] if rng.random() < 0.25 else []


def return_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return in an eighth of the worlds a finding on all nodes while they return to service."""
    draw = _FaultDraw(rng, plan)
    if rng.random() >= 0.125:
        return []
    reason = rng.choice(("cordoned", "without power"))
    action = rng.choice(_XID_ACTIONS)
    return [draw.fault("raise_finding_on_return", reason, 6.0, 12.0, detail=action, value=rng.uniform(0.0, 4.0))]


_CUT_DIRECTIONS = ("both", "to it", "from it")
"""Directions in which the leader is cut off."""


def leader_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return in an eighth of the worlds with several controllers a cut of the leader from the nodes.

    The leader still reaches the database.
    """
    draw = _FaultDraw(rng, plan)
    if rng.random() >= 0.125 or len(plan.controllers) < 2:
        return []
    return [draw.fault("cut_leader", "", 30.0, 45.0, detail=rng.choice(_CUT_DIRECTIONS))]


_UNRELATED_FINDINGS = (
    (FindingKind.GPU_LOST, Action.REPAIR),
    (FindingKind.GPU_ECC_UNCORRECTABLE, Action.RESET_GPU),
    (FindingKind.HOST_KERNEL, Action.REBOOT_NODE),
    (FindingKind.GPU_ROW_REMAP_FAILURE, Action.REPAIR),
    (FindingKind.GPU_RECOVERY_ACTION, Action.RESET_GPU),
    (FindingKind.GPU_RETIRED_PAGES, Action.REPAIR),
)
"""Findings that no common cause explains, with their actions."""


def breaker_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return in a few worlds unrelated findings on more nodes than the fleet's eviction budget allows.

    Further ones follow when the window of the budget has passed.
    """
    if rng.random() >= 0.04:
        return []
    nodes = [machine.name for machine in plan.machines]
    faults = []
    for at in (FAULTS_BEGIN_S + 2.0, FAULTS_BEGIN_S + 6.0 + plan.policy.budget.window_s):
        rng.shuffle(nodes)
        findings = rng.sample(_UNRELATED_FINDINGS, min(len(nodes), len(_UNRELATED_FINDINGS)))
        for index, (kind, action) in enumerate(findings):
            faults.append(Fault(at + index, "raise_finding", nodes[index], 12.0, f"{kind}:{action}"))
    return faults


def audit_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return faults of an audited job: wrong results of a GPU in training, in audits, or of two GPUs in both."""
    draw = _FaultDraw(rng, plan)
    kinds = rng.choice((("compute_wrongly",), ("audit_wrongly",), ("compute_wrongly", "audit_wrongly")))
    return [draw.fault(kind, draw.seat()) for kind in kinds]


def common_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return faults of all kinds that may occur in every world."""
    draw = _FaultDraw(rng, plan)
    weights = [weight for weight, _ in _COMMON_FAULTS]
    faults = [rng.choices(_COMMON_FAULTS, weights=weights)[0][1](draw) for _ in range(rng.randint(2, 14))]
    if faults and rng.random() < 0.3:  # all faults within two seconds
        moment = draw.moment()
        faults = [Fault(**{**f.__dict__, "at": moment + rng.uniform(0, 2.0)}) for f in faults]
    return faults


def straggler_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return periods in which one node, some or all are slow, long enough for a straggler finding."""
    faults = []
    for at in (FAULTS_BEGIN_S + 8.0, FAULTS_BEGIN_S + 38.0, FAULTS_BEGIN_S + 68.0)[: rng.randint(1, 3)]:
        job = rng.choice(plan.jobs)
        seats = job.nodes[: job.spec.max_nodes]
        count = rng.choice((1, 1, 1, min(2, len(seats)), len(seats)))
        nodes = " ".join(rng.sample(seats, count))
        faults.append(
            Fault(at + rng.uniform(0.0, 2.0), "slow_down", nodes, rng.uniform(14.0, 18.0), "", rng.uniform(3.2, 4.0))
        )
    return faults
