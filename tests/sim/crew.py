"""The people who put everything right once nothing breaks any more: they mend, repair and readmit, and wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep_controller.core.events import OperatorAction, OperatorCommand

from everstep.errors import EverstepError
from everstep.vocabulary import JobState, NodeState
from tests.sim import facts

if TYPE_CHECKING:
    from tests.sim.world import World

ROUND_S = 4.0


class Crew:
    """Acts only on what the leader's API shows."""

    def __init__(self, world: World) -> None:
        self.world = world

    def mend_everything(self) -> None:
        """Network, database, power, clocks' owners: all as they should be, from now on."""
        world = self.world
        world.trace("crew", "everything is mended from here on")
        world.wires.heal()
        world.database.away, world.database.fail_next, world.database.latency_s = False, "", 0.002
        world.storage.mend()
        world.outside.away, world.outside.slow_s = False, 0.0
        for controller in world.controllers:
            controller.resume()
            controller.start()
        for machine in world.machines.values():
            machine.slowness, machine.probes_fail, machine.vault.full = 1.0, False, False
            machine.thaw()
            machine.boot()
            machine.clear_findings()
            for launcher in machine.launchers.values():
                for rank in launcher.ranks.values():
                    rank.resume()
            if machine.lying or machine.misjudging:
                machine.replace_gpus()
        self._round()

    def _round(self) -> None:
        """Looks at the fleet, and does what it asks people to do."""
        leader = self.world.leader()
        if leader is not None:
            for command in self._wanted():
                leader.order(command, lambda error, c=command: self._answered(c, error))  # type: ignore[misc]
        self.world.timeline.after(ROUND_S, self._round)

    def _answered(self, command: OperatorCommand, error: EverstepError | None) -> None:
        if error is None:
            self.world.see(facts.Ordered(str(command.action), command.node or "", command.job or ""))

    def _wanted(self) -> list[OperatorCommand]:
        leader = self.world.leader()
        assert leader is not None
        state = leader.state
        commands = []
        if state.fleet.breaker_reason:
            commands.append(self._command(OperatorAction.RESET_BREAKER))
        for node, record in state.nodes.items():
            waits = record.quarantine.needs_operator or record.state in (NodeState.HELD, NodeState.REPAIR)
            excluded = any(node in job.membership.excluded_nodes for job in state.jobs.values())
            unable = any(
                node in job.membership.launchers and not job.membership.launchers[node].usable
                for job in state.jobs.values()
            )
            if waits or excluded or (unable and record.state is NodeState.HEALTHY):
                commands.append(self._command(OperatorAction.READMIT, node=node))
        for name, job in state.jobs.items():
            if (
                job.membership.node_limit is not None
                and job.membership.node_limit < job.spec.max_nodes
                and job.status.state
                in (
                    JobState.RUNNING,
                    JobState.PAUSED,
                    JobState.FORMING,
                )
            ):
                commands.append(self._command(OperatorAction.RESIZE_JOB, job=name, size=job.spec.max_nodes))
        return commands

    def _command(
        self, kind: OperatorAction, node: str | None = None, job: str | None = None, size: int | None = None
    ) -> OperatorCommand:
        trace = self.world.trace_id("crew")
        return OperatorCommand(
            action=kind, actor="crew", reason="mended", node=node, job=job, node_limit=size, trace=trace
        )
