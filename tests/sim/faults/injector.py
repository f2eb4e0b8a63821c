"""Inject the faults of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from everstep.errors import EverstepError
from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep_controller.core.events import OperatorAction, OperatorCommand
from tests.sim.cluster.database import DEFAULT_LATENCY_S
from tests.sim.cluster.observations import BatchWritten, CommandAccepted, FaultInjected, RemediationRequested
from tests.sim.faults.kinds import Fault
from tests.sim.faults.maintenance import PlannedMaintenance

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine
    from tests.sim.cluster.world import World
    from tests.sim.processes.rank import RankProcess


HEARTBEAT_WAIT_S = 1.5
"""Seconds after which an agent has sent another heartbeat."""
OPERATOR_REACTION_S = 0.3
"""Seconds after which operators react to a finding."""


class FaultInjector:
    """Inject faults into a world, and end each after its ``seconds``. Each public method is a kind of fault."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._awaited_moment, self._pause_s = "", 0.0
        world.subscribe(BatchWritten, self._on_write)
        world.subscribe(RemediationRequested, lambda _: self._reach_moment("sent"))

    def inject(self, fault: Fault) -> None:
        """Inject a fault."""
        self.world.trace("fault", str(fault))
        self.world.observe(FaultInjected(fault.kind, fault.target if fault.target in self.world.machines else ""))
        getattr(self, fault.kind)(fault)

    def _machine(self, fault: Fault) -> Machine:
        return self.world.machines[fault.target]

    def _rack(self, fault: Fault) -> list[Machine]:
        rack = self._machine(fault).domain.rack
        return [machine for machine in self.world.machines.values() if machine.domain.rack == rack]

    def _after_fault(self, fault: Fault, call: object) -> None:
        self.world.timeline.after(fault.seconds, call)  # type: ignore[arg-type]

    def _running_ranks(self, fault: Fault) -> list[RankProcess]:
        launchers = self._machine(fault).launchers.values()
        return [rank for launcher in launchers for rank in launcher.ranks.values() if rank.is_alive]

    def kill_rank(self, fault: Fault) -> None:
        if ranks := self._running_ranks(fault):
            self.world.rng.choice(ranks).die(9)

    def stop_rank(self, fault: Fault) -> None:
        if ranks := self._running_ranks(fault):
            rank = self.world.rng.choice(ranks)
            rank.stop()
            self._after_fault(fault, rank.resume)

    def kill_launcher(self, fault: Fault) -> None:
        launchers = list(self._machine(fault).launchers.values())
        if launchers:
            self.world.rng.choice(launchers).die(restart=True)

    def kill_agent(self, fault: Fault) -> None:
        self._machine(fault).kill_agent()

    def fail_disk(self, fault: Fault) -> None:
        """Fail the agent's next write to its spool. From then on it keeps unsent reports in memory only."""
        agent = self._machine(fault).agent
        if agent is not None:
            agent.spool.close()

    def freeze(self, fault: Fault) -> None:
        self._machine(fault).freeze()
        self._after_fault(fault, self._machine(fault).unfreeze)

    def lose_power(self, fault: Fault) -> None:
        self._machine(fault).lose_power()
        self._after_fault(fault, self._machine(fault).boot)

    def lose_rack_power(self, fault: Fault) -> None:
        for machine in self._rack(fault):
            machine.lose_power()
            self._after_fault(fault, machine.boot)

    def lose_power_unit(self, fault: Fault) -> None:
        """Cut the power of all machines of the power unit, or of the machine alone if its unit is unknown."""
        unit = self._machine(fault).domain.power
        supplied = [machine for machine in self.world.machines.values() if machine.domain.power == unit != ""]
        for machine in supplied or [self._machine(fault)]:
            machine.lose_power()
            self._after_fault(fault, machine.boot)

    def reboot_rack(self, fault: Fault) -> None:
        for machine in self._rack(fault):
            machine.reboot()

    def slow_down(self, fault: Fault) -> None:
        """Slow one or several machines down, which the target lists."""
        for machine in (self.world.machines[name] for name in fault.target.split()):
            machine.slowness = fault.value
            self._after_fault(fault, lambda m=machine: setattr(m, "slowness", 1.0))

    def compute_wrongly(self, fault: Fault) -> None:
        self._machine(fault).computes_wrongly = True

    def audit_wrongly(self, fault: Fault) -> None:
        self._machine(fault).audits_wrongly = True

    def fill_vault(self, fault: Fault) -> None:
        """Fill the memory, so that the vault has no room for copies of other nodes' slots."""
        machine = self._machine(fault)
        machine.vault_memory.is_full = True
        self._after_fault(fault, lambda: setattr(machine.vault_memory, "is_full", False))

    def fail_probes(self, fault: Fault) -> None:
        machine = self._machine(fault)
        machine.probes_fail = True
        self._after_fault(fault, lambda: setattr(machine, "probes_fail", False))

    def corrupt_slot(self, fault: Fault) -> None:
        """Corrupt the newest sealed share on the machine, so that its digest does not match."""
        machine = self._machine(fault)
        segments = [segment for job in machine.assigned_jobs for segment in machine.vault_memory.segments_of(job)]
        slots = [slot for segment in segments for slot in segment.sealed()]
        if slots:
            max(slots, key=lambda slot: slot.version).corrupt = True

    def kill_vault(self, fault: Fault) -> None:
        """Kill the vault by SIGKILL. Its memory stays."""
        self._machine(fault).vault_process.crash()

    def raise_finding(self, fault: Fault) -> None:
        """Raise the finding ``kind:action`` that the detail names."""
        kind, _, action = fault.detail.partition(":")
        self._raise_finding(fault, self._machine(fault), FindingKind(kind), action=Action(action))

    def _raise_finding(self, fault: Fault, machine: Machine, kind: FindingKind, **fields: Any) -> None:
        defaults = {"subject": "GPU-0", "severity": Severity.CRITICAL, "message": f"{kind} on GPU-0"}
        if machine.has_power:
            machine.raise_finding(Finding(kind=kind, since=machine.clock.wall(), **(defaults | fields)))
            self._after_fault(fault, machine.clear_findings)

    def raise_finding_everywhere(self, fault: Fault) -> None:
        """Raise the same finding on all machines within ``value`` seconds, as a new driver may do."""
        action, kind = Action(fault.detail), FindingKind.GPU_XID
        for machine in self.world.machines.values():
            moment = self.world.rng.uniform(0.0, fault.value)
            self.world.timeline.after(
                moment,
                lambda m=machine: self._raise_finding(fault, m, kind, action=action, xid=119),  # type: ignore[misc]
            )

    def raise_finding_on_return(self, fault: Fault) -> None:
        """Take all machines out of service, return them at once, and raise the same finding on all of them then."""
        for machine in self.world.machines.values():
            if fault.target == "cordoned":
                self.world.scheduler.cordon(machine.name, "driver-team", "a new driver")
            else:
                machine.lose_power()
        return_s, finding = (
            fault.seconds,
            Fault(**{**fault.__dict__, "kind": "raise_finding_everywhere", "seconds": 20.0}),
        )
        self.world.timeline.after(return_s, lambda: self._return_all(fault))
        self.world.timeline.after(return_s + 1.0, lambda: self.raise_finding_everywhere(finding))

    def _return_all(self, fault: Fault) -> None:
        for machine in self.world.machines.values():
            if fault.target == "cordoned":
                self.world.scheduler.uncordon(machine.name)
            else:
                machine.boot()

    def report_slow_link(self, fault: Fault) -> None:
        """Raise a finding about a slow link between two machines.

        The detail names the ends at which probes fail: ``first``, ``second``, ``both``, or none if the link is slow.
        """
        first, second = fault.target.split()
        if first == second:
            return
        bad = {"first": [first], "second": [second], "both": [first, second]}.get(fault.detail, [])
        for machine in (self.world.machines[name] for name in bad):
            machine.probes_fail = True
            self._after_fault(fault, lambda m=machine: setattr(m, "probes_fail", False))
        slow = {"severity": Severity.WARNING, "subject": second, "evidence": {"peer": second}}
        self._raise_finding(fault, self.world.machines[first], FindingKind.NETWORK_SLOW_LINK, **slow)

    def reset_connections(self, fault: Fault) -> None:
        for connection in list(self.world.network.connections):
            if fault.target in connection.hosts:
                connection.reset()

    def delay_connection(self, fault: Fault) -> None:
        """Delay frames on the node's current connection beyond the next connection of its agent.

        With a detail, the agent dies meanwhile, so that the frames arrive in its next incarnation.
        """
        for connection in self.world.network.connections:
            if fault.target == connection.hosts[0]:
                connection.extra_delay_s[0] = fault.value
        if fault.detail:
            self.world.timeline.after(HEARTBEAT_WAIT_S, self._machine(fault).kill_agent)

    def _cut(self, fault: Fault, *pairs: tuple[str, str]) -> None:
        network = self.world.network
        for pair in pairs:
            network.cut(*pair)
            self._after_fault(fault, lambda p=pair: network.restore(*p))

    def cut_to_controllers(self, fault: Fault) -> None:
        """Cut the direction from the node to all controllers."""
        self._cut(fault, *((fault.target, controller.name) for controller in self.world.controllers))

    def cut_from_controllers(self, fault: Fault) -> None:
        """Cut the direction from all controllers to the node."""
        self._cut(fault, *((controller.name, fault.target) for controller in self.world.controllers))

    def lose_network(self, fault: Fault) -> None:
        self._cut(fault, (fault.target, "*"), ("*", fault.target))

    def cut_pair(self, fault: Fault) -> None:
        """Cut the direction from the target to the node that the detail names."""
        if fault.target != fault.detail:
            self._cut(fault, (fault.target, fault.detail))

    def cut_rack(self, fault: Fault) -> None:
        for machine in self._rack(fault):
            self._cut(fault, (machine.name, "*"), ("*", machine.name))

    def cut_controller(self, fault: Fault) -> None:
        self._cut(fault, (fault.target, "*"), ("*", fault.target))

    def cut_leader(self, fault: Fault) -> None:
        leader = self.world.leader()
        if leader is not None:
            to_leader, from_leader = ("*", leader.name), (leader.name, "*")
            cuts = {"both": (to_leader, from_leader), "to it": (to_leader,), "from it": (from_leader,)}
            self._cut(fault, *cuts[fault.detail])

    def slow_links(self, fault: Fault) -> None:
        self.world.network.slow(fault.target, fault.value)
        self._after_fault(fault, lambda: self.world.network.slow(fault.target, 0.0))

    def lose_packets(self, fault: Fault) -> None:
        self.world.network.loss = fault.value
        self._after_fault(fault, lambda: setattr(self.world.network, "loss", self.world.plan.loss))

    def crash_controller(self, fault: Fault) -> None:
        self.world.controller(fault.target).crash()

    def crash_at_remediation(self, fault: Fault) -> None:
        """Kill the leader at a moment of the next remediation, which the detail names."""
        self._awaited_moment, self._pause_s = fault.detail, 0.0

    def pause_at_remediation(self, fault: Fault) -> None:
        """Pause the leader at a moment of the next remediation. It resumes when another controller leads."""
        self._awaited_moment, self._pause_s = fault.detail, fault.seconds

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.remediations.values():
            self._reach_moment("ended" if row.ended_at is not None else str(row.state))

    def _reach_moment(self, moment: str) -> None:
        leader = self.world.leader()
        if self._awaited_moment != moment or leader is None:
            return
        self._awaited_moment = ""
        self.world.trace("fault", f"the leader {'pauses' if self._pause_s else 'dies'}: a remediation is {moment}")
        if self._pause_s:
            self.world.timeline.after(0.0, leader.pause)
            self.world.timeline.after(self._pause_s, leader.resume)
        else:
            self.world.timeline.after(0.0, leader.crash)

    def pause_controller(self, fault: Fault) -> None:
        controller = self.world.controller(fault.target)
        controller.pause()
        self._after_fault(fault, controller.resume)

    def fail_write(self, fault: Fault) -> None:
        self.world.database.next_write_fault = fault.detail

    def stop_database(self, fault: Fault) -> None:
        self.world.database.is_unavailable = True
        self._after_fault(fault, lambda: setattr(self.world.database, "is_unavailable", False))

    def slow_database(self, fault: Fault) -> None:
        previous_s, self.world.database.latency_s = self.world.database.latency_s, fault.value
        restored_s = min(previous_s, DEFAULT_LATENCY_S)
        self._after_fault(fault, lambda: setattr(self.world.database, "latency_s", restored_s))

    def jump_clock(self, fault: Fault) -> None:
        host = self.world.machines.get(fault.target) or self.world.controller(fault.target)
        host.clock.jump_wall(fault.value)

    def operator_command(self, fault: Fault) -> None:
        """Send a command that the state of the fleet does not require."""
        action = OperatorAction(fault.detail)
        job = fault.target if "job" in action else None
        size = int(fault.value) if action is OperatorAction.RESIZE_JOB else None
        node = fault.target if job is None and action is not OperatorAction.RESET_BREAKER else None
        self.send_command(
            OperatorCommand(action=action, actor="random", reason="random command", node=node, job=job, node_limit=size)
        )

    def send_command(self, command: OperatorCommand) -> None:
        """Send the leader a command, which it may refuse."""

        def answered(error: EverstepError | None) -> None:
            if error is None:
                self.world.observe(CommandAccepted(str(command.action), command.node or "", command.job or ""))

        if (leader := self.world.leader()) is not None:
            leader.submit_command(msgspec.structs.replace(command, trace=self.world.trace_id(command.actor)), answered)

    def evict_all_nodes(self, fault: Fault) -> None:
        for name in self.world.machines:
            self.send_command(
                OperatorCommand(action=OperatorAction.EVICT, actor="random", reason="all nodes", node=name)
            )

    def reboot_drained_rack(self, fault: Fault) -> None:
        """Drain, reboot and readmit the nodes of a rack."""
        for machine in self._rack(fault):
            self.send_command(
                OperatorCommand(action=OperatorAction.DRAIN, actor="operators", reason="kernel", node=machine.name)
            )
            self.world.timeline.after(fault.seconds / 2, machine.reboot)
            readmission = OperatorCommand(
                action=OperatorAction.READMIT, actor="operators", reason="done", node=machine.name
            )
            self._after_fault(fault, lambda c=readmission: self.send_command(c))

    def maintenance_window(self, fault: Fault) -> None:
        """Reboot a node within a maintenance window that begins at once.

        With a detail, the node shows that finding just before.
        """
        if fault.detail:
            self.raise_finding(fault)
        self.world.timeline.after(OPERATOR_REACTION_S, lambda: self._order_window(fault))
        self.world.timeline.after(fault.seconds / 2, self._machine(fault).reboot)

    def _order_window(self, fault: Fault) -> None:
        if (leader := self.world.leader()) is not None:
            until = leader.now() + fault.seconds
            kind, node = OperatorAction.MAINTENANCE, fault.target
            self.send_command(
                OperatorCommand(action=kind, actor="operators", reason="firmware", node=node, until=until)
            )

    def plan_window(self, fault: Fault) -> None:
        """Order a maintenance window that begins later."""
        PlannedMaintenance(self, fault).begin()

    def cordon(self, fault: Fault) -> None:
        """Cordon the node as another owner, and uncordon it later."""
        scheduler = self.world.scheduler
        scheduler.cordon(fault.target, "storage-team", "disk swap")
        self._after_fault(fault, lambda: scheduler.uncordon(fault.target))

    def stop_scheduler(self, fault: Fault) -> None:
        self.world.scheduler.is_unavailable = True
        self._after_fault(fault, lambda: setattr(self.world.scheduler, "is_unavailable", False))

    def _impair_storage(self, fault: Fault, attribute: str, faulty: object, healthy: object) -> None:
        storage = self.world.storage
        setattr(storage, attribute, faulty)
        self._after_fault(fault, lambda: setattr(storage, attribute, healthy))

    def stop_storage(self, fault: Fault) -> None:
        self._impair_storage(fault, "is_unavailable", True, False)

    def deny_storage(self, fault: Fault) -> None:
        self._impair_storage(fault, "denies_access", True, False)

    def delay_listings(self, fault: Fault) -> None:
        self._impair_storage(fault, "delays_listings", True, False)

    def slow_storage(self, fault: Fault) -> None:
        self._impair_storage(fault, "extra_write_s", fault.value, 0.0)

    def slow_scheduler(self, fault: Fault) -> None:
        self.world.scheduler.extra_delay_s = fault.value
        self._after_fault(fault, lambda: setattr(self.world.scheduler, "extra_delay_s", 0.0))
