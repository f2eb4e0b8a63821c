"""Carries out the faults of a plan: each method is one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from everstep_controller.core.events import OperatorAction, OperatorCommand

from everstep.errors import EverstepError
from everstep.vocabulary import Action, Finding, FindingKind, Severity
from tests.sim import facts
from tests.sim.faults import Fault
from tests.sim.upkeep import Upkeep

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.world import World


BEATEN_S = 1.5
"""In which an agent has said something more."""
NOTICED_S = 0.3
"""In which people hear of a finding."""


class Mischief:
    """Breaks things in a world, and mends them after the fault's seconds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._trap, self._stopped_s = "", 0.0
        world.watch(facts.Durable, self._written)
        world.watch(facts.RemedyAsked, lambda _: self._spring("asked"))

    def strike(self, fault: Fault) -> None:
        self.world.trace("fault", str(fault))
        self.world.see(facts.FaultBegan(fault.kind, fault.target if fault.target in self.world.machines else ""))
        getattr(self, fault.kind)(fault)

    def _machine(self, fault: Fault) -> Machine:
        return self.world.machines[fault.target]

    def _rack(self, fault: Fault) -> list[Machine]:
        rack = self._machine(fault).domain.rack
        return [machine for machine in self.world.machines.values() if machine.domain.rack == rack]

    def _later(self, fault: Fault, call: object) -> None:
        self.world.timeline.after(fault.seconds, call)  # type: ignore[arg-type]

    # --- processes ---------------------------------------------------------------------------------------------------

    def kill_rank(self, fault: Fault) -> None:
        ranks = [r for launcher in self._machine(fault).launchers.values() for r in launcher.ranks.values() if r.alive]
        if ranks:
            self.world.rng.choice(ranks).die(9)

    def stop_rank(self, fault: Fault) -> None:
        ranks = [r for launcher in self._machine(fault).launchers.values() for r in launcher.ranks.values() if r.alive]
        if ranks:
            rank = self.world.rng.choice(ranks)
            rank.stop()
            self._later(fault, rank.resume)

    def kill_launcher(self, fault: Fault) -> None:
        launchers = list(self._machine(fault).launchers.values())
        if launchers:
            self.world.rng.choice(launchers).die(restart=True)

    def kill_agent(self, fault: Fault) -> None:
        self._machine(fault).kill_agent()

    def fail_disk(self, fault: Fault) -> None:
        """The agent's next write to its spool fails; what it has not said it keeps in memory only from then on."""
        agent = self._machine(fault).agent
        if agent is not None:
            agent.spool.close()

    # --- machines ----------------------------------------------------------------------------------------------------

    def freeze(self, fault: Fault) -> None:
        self._machine(fault).freeze()
        self._later(fault, self._machine(fault).thaw)

    def lose_power(self, fault: Fault) -> None:
        self._machine(fault).lose_power()
        self._later(fault, self._machine(fault).boot)

    def lose_rack(self, fault: Fault) -> None:
        for machine in self._rack(fault):
            machine.lose_power()
            self._later(fault, machine.boot)

    def lose_power_unit(self, fault: Fault) -> None:
        """Of a machine that names no power unit, its own."""
        unit = self._machine(fault).domain.power
        fed = [machine for machine in self.world.machines.values() if machine.domain.power == unit != ""]
        for machine in fed or [self._machine(fault)]:
            machine.lose_power()
            self._later(fault, machine.boot)

    def reboot_rack(self, fault: Fault) -> None:
        for machine in self._rack(fault):
            machine.reboot()

    def slow_down(self, fault: Fault) -> None:
        """One machine, or several."""
        for machine in (self.world.machines[name] for name in fault.target.split()):
            machine.slowness = fault.value
            self._later(fault, lambda m=machine: setattr(m, "slowness", 1.0))  # type: ignore[misc]

    def compute_wrongly(self, fault: Fault) -> None:
        self._machine(fault).lying = True

    def audit_wrongly(self, fault: Fault) -> None:
        self._machine(fault).misjudging = True

    def fill_memory(self, fault: Fault) -> None:
        """Its vault has no room for other nodes' copies."""
        machine = self._machine(fault)
        machine.vault.full = True
        self._later(fault, lambda: setattr(machine.vault, "full", False))

    def fail_probes(self, fault: Fault) -> None:
        machine = self._machine(fault)
        machine.probes_fail = True
        self._later(fault, lambda: setattr(machine, "probes_fail", False))

    def rot_slots(self, fault: Fault) -> None:
        """One share on this machine is not what was sealed; its hash says so."""
        machine = self._machine(fault)
        slots = [s for job in machine.assigned for segment in machine.vault.of_job(job) for s in segment.sealed()]
        if slots:
            max(slots, key=lambda slot: slot.version).rotten = True

    def kill_vault(self, fault: Fault) -> None:
        """SIGKILL; what it holds stays where it is."""
        self._machine(fault).vault_process.crash()

    def sense(self, fault: Fault) -> None:
        kind, _, action = fault.detail.partition(":")
        self._sense(fault, self._machine(fault), FindingKind(kind), action=Action(action))

    def _sense(self, fault: Fault, machine: Machine, kind: FindingKind, **more: Any) -> None:
        fields = {"subject": "GPU-0", "severity": Severity.CRITICAL, "message": f"{kind} on GPU-0"}
        if machine.power:
            machine.raise_finding(Finding(kind=kind, since=machine.clock.wall(), **(fields | more)))
            self._later(fault, machine.clear_findings)

    def sense_everywhere(self, fault: Fault) -> None:
        """A new driver: all machines show the same, within ``value`` seconds."""
        action, kind = Action(fault.detail), FindingKind.GPU_XID
        for machine in self.world.machines.values():
            moment = self.world.rng.uniform(0.0, fault.value)
            self.world.timeline.after(
                moment,
                lambda m=machine: self._sense(fault, m, kind, action=action, xid=119),  # type: ignore[misc]
            )

    def sense_on_return(self, fault: Fault) -> None:
        """All machines come back at once, on probation, and then show the same, within ``value`` seconds."""
        for machine in self.world.machines.values():
            if fault.target == "cordoned":
                self.world.outside.cordon(machine.name, "somebody", "a new driver")
            else:
                machine.lose_power()
        back, shown = fault.seconds, Fault(**{**fault.__dict__, "kind": "sense_everywhere", "seconds": 20.0})
        self.world.timeline.after(back, lambda: self._all_back(fault))
        self.world.timeline.after(back + 1.0, lambda: self.sense_everywhere(shown))

    def _all_back(self, fault: Fault) -> None:
        for machine in self.world.machines.values():
            if fault.target == "cordoned":
                self.world.outside.uncordon(machine.name)
            else:
                machine.boot()

    def blame_pair(self, fault: Fault) -> None:
        """One machine finds its link to another slow. Probes fail at ``one`` end, at the ``other``, at both or at
        neither: then it was the link."""
        one, other = fault.target.split()
        if one == other:
            return
        bad = {"one": [one], "other": [other], "both": [one, other]}.get(fault.detail, [])
        for machine in (self.world.machines[name] for name in bad):
            machine.probes_fail = True
            self._later(fault, lambda m=machine: setattr(m, "probes_fail", False))  # type: ignore[misc]
        slow = {"severity": Severity.WARNING, "subject": other, "evidence": {"peer": other}}
        self._sense(fault, self.world.machines[one], FindingKind.NETWORK_SLOW_LINK, **slow)

    # --- the network -------------------------------------------------------------------------------------------------

    def reset_connections(self, fault: Fault) -> None:
        for line in list(self.world.wires.lines):
            if fault.target in line.names:
                line.reset()

    def delay_connection(self, fault: Fault) -> None:
        """What the node says on the connection that it has comes late: after its agent's next connection, or life."""
        for line in self.world.wires.lines:
            if fault.target == line.names[0]:
                line.lag_s[0] = fault.value
        if fault.detail:
            self.world.timeline.after(BEATEN_S, self._machine(fault).kill_agent)

    def _cut(self, fault: Fault, *pairs: tuple[str, str]) -> None:
        wires = self.world.wires
        for pair in pairs:
            wires.cut(*pair)
            self._later(fault, lambda p=pair: wires.mend(*p))  # type: ignore[misc]

    def mute(self, fault: Fault) -> None:
        """What the node says reaches no controller; what they say reaches it."""
        self._cut(fault, *((fault.target, controller.name) for controller in self.world.controllers))

    def deafen(self, fault: Fault) -> None:
        self._cut(fault, *((controller.name, fault.target) for controller in self.world.controllers))

    def lose_network(self, fault: Fault) -> None:
        self._cut(fault, (fault.target, "*"), ("*", fault.target))

    def cut_pair(self, fault: Fault) -> None:
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
            towards, away = ("*", leader.name), (leader.name, "*")
            self._cut(fault, *{"both": (towards, away), "towards it": (towards,), "from it": (away,)}[fault.detail])

    def slow_links(self, fault: Fault) -> None:
        self.world.wires.slow(fault.target, fault.value)
        self._later(fault, lambda: self.world.wires.slow(fault.target, 0.0))

    def lose_packets(self, fault: Fault) -> None:
        self.world.wires.loss = fault.value
        self._later(fault, lambda: setattr(self.world.wires, "loss", self.world.plan.loss))

    # --- controllers and their database ------------------------------------------------------------------------------

    def crash_controller(self, fault: Fault) -> None:
        self.world.controller(fault.target).crash()

    def crash_at_remedy(self, fault: Fault) -> None:
        """Whoever leads dies in the middle of the next remedy: it is started, was just asked for, or has just ended."""
        self._trap, self._stopped_s = fault.detail, 0.0

    def pause_at_remedy(self, fault: Fault) -> None:
        """The same, and it is only stopped: it wakes when another leads."""
        self._trap, self._stopped_s = fault.detail, fault.seconds

    def _written(self, fact: facts.Durable) -> None:
        for row in fact.batch.remediations.values():
            self._spring("ended" if row.ended_at is not None else str(row.state))

    def _spring(self, moment: str) -> None:
        leader = self.world.leader()
        if self._trap != moment or leader is None:
            return
        self._trap = ""
        self.world.trace("fault", f"the leader {'stops' if self._stopped_s else 'dies'}, with a remedy {moment}")
        if self._stopped_s:
            self.world.timeline.after(0.0, leader.pause)
            self.world.timeline.after(self._stopped_s, leader.resume)
        else:
            self.world.timeline.after(0.0, leader.crash)

    def pause_controller(self, fault: Fault) -> None:
        controller = self.world.controller(fault.target)
        controller.pause()
        self._later(fault, controller.resume)

    def fail_write(self, fault: Fault) -> None:
        self.world.database.fail_next = fault.detail

    def database_away(self, fault: Fault) -> None:
        self.world.database.away = True
        self._later(fault, lambda: setattr(self.world.database, "away", False))

    def slow_database(self, fault: Fault) -> None:
        before, self.world.database.latency_s = self.world.database.latency_s, fault.value
        self._later(fault, lambda: setattr(self.world.database, "latency_s", min(before, 0.002)))

    def jump_clock(self, fault: Fault) -> None:
        holder = self.world.machines.get(fault.target) or self.world.controller(fault.target)
        holder.clock.jump_wall(fault.value)

    # --- operators ---------------------------------------------------------------------------------------------------

    def order(self, fault: Fault) -> None:
        action = OperatorAction(fault.detail)
        job = fault.target if "job" in action else None
        size = int(fault.value) if action is OperatorAction.RESIZE_JOB else None
        node = fault.target if job is None and action is not OperatorAction.RESET_BREAKER else None
        self.give(OperatorCommand(action=action, actor="odd", reason="why not", node=node, job=job, node_limit=size))

    def give(self, command: OperatorCommand) -> None:
        """An order to whoever leads; refused ones are no trouble."""

        def answered(error: EverstepError | None) -> None:
            if error is None:
                self.world.see(facts.Ordered(str(command.action), command.node or "", command.job or ""))

        if (leader := self.world.leader()) is not None:
            leader.order(msgspec.structs.replace(command, trace=self.world.trace_id(command.actor)), answered)

    def evict_everybody(self, fault: Fault) -> None:
        for name in self.world.machines:
            self.give(OperatorCommand(action=OperatorAction.EVICT, actor="odd", reason="all of them", node=name))

    def maintain_rack(self, fault: Fault) -> None:
        """Drained, rebooted, given back."""
        for machine in self._rack(fault):
            self.give(OperatorCommand(action=OperatorAction.DRAIN, actor="crew", reason="kernel", node=machine.name))
            self.world.timeline.after(fault.seconds / 2, machine.reboot)
            back = OperatorCommand(action=OperatorAction.READMIT, actor="crew", reason="done", node=machine.name)
            self._later(fault, lambda c=back: self.give(c))  # type: ignore[misc]

    def maintenance_window(self, fault: Fault) -> None:
        """The same, announced: what happens until the window ends is held against nobody, and nothing is done by
        itself. With a ``detail``, of a node that has just shown that finding."""
        if fault.detail:
            self.sense(fault)
        self.world.timeline.after(NOTICED_S, lambda: self._announce(fault))
        self.world.timeline.after(fault.seconds / 2, self._machine(fault).reboot)

    def _announce(self, fault: Fault) -> None:
        if (leader := self.world.leader()) is not None:
            until = leader.now() + fault.seconds
            kind, node = OperatorAction.MAINTENANCE, fault.target
            self.give(OperatorCommand(action=kind, actor="crew", reason="firmware", node=node, until=until))

    def plan_window(self, fault: Fault) -> None:
        """The same, planned ahead."""
        Upkeep(self, fault).begin()

    def cordon(self, fault: Fault) -> None:
        """Somebody else takes the node out of the scheduler's service, and gives it back."""
        outside = self.world.outside
        outside.cordon(fault.target, "somebody", "disk swap")
        self._later(fault, lambda: outside.uncordon(fault.target))

    def scheduler_away(self, fault: Fault) -> None:
        self.world.outside.away = True
        self._later(fault, lambda: setattr(self.world.outside, "away", False))

    # --- storage -----------------------------------------------------------------------------------------------------

    def _ails(self, fault: Fault, how: str, much: object, well: object) -> None:
        storage = self.world.storage
        setattr(storage, how, much)
        self._later(fault, lambda: setattr(storage, how, well))

    def storage_away(self, fault: Fault) -> None:
        self._ails(fault, "away", True, False)

    def storage_refuses(self, fault: Fault) -> None:
        self._ails(fault, "refuses", True, False)

    def storage_lists_late(self, fault: Fault) -> None:
        self._ails(fault, "lists_late", True, False)

    def slow_storage(self, fault: Fault) -> None:
        self._ails(fault, "slow_s", fault.value, 0.0)

    # --- the scheduler -----------------------------------------------------------------------------------------------

    def slow_scheduler(self, fault: Fault) -> None:
        self.world.outside.slow_s = fault.value
        self._later(fault, lambda: setattr(self.world.outside, "slow_s", 0.0))
