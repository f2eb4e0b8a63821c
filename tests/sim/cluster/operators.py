"""The operators, who repair and readmit after the last fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.errors import EverstepError
from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.events import OperatorAction, OperatorCommand
from tests.sim.cluster.database import DEFAULT_LATENCY_S
from tests.sim.cluster.observations import CommandAccepted

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

ROUND_S = 4.0
"""Seconds between two looks of the operators at the fleet."""
UNFINISHED = (JobState.RUNNING, JobState.PAUSED, JobState.FORMING)
"""States of jobs that may still grow."""


class Operators:
    """Act as operators who know only what the leader's API shows."""

    def __init__(self, world: World) -> None:
        self.world = world

    def repair_everything(self) -> None:
        """End all faults of network, database, storage, scheduler and machines."""
        world = self.world
        world.trace("operators", "all faults are repaired")
        world.network.restore_all()
        world.database.is_unavailable, world.database.next_write_fault = False, ""
        world.database.latency_s = DEFAULT_LATENCY_S
        world.storage.restore()
        world.scheduler.is_unavailable, world.scheduler.extra_delay_s = False, 0.0
        for controller in world.controllers:
            controller.resume()
            controller.start()
        for machine in world.machines.values():
            machine.slowness, machine.probes_fail, machine.vault_memory.is_full = 1.0, False, False
            machine.unfreeze()
            machine.boot()
            machine.clear_findings()
            for launcher in machine.launchers.values():
                for rank in launcher.ranks.values():
                    rank.resume()
            if machine.computes_wrongly or machine.audits_wrongly:
                machine.replace_gpus()
        self._act()

    def _act(self) -> None:
        """Send the commands that the state of the fleet requires, now and regularly."""
        leader = self.world.leader()
        if leader is not None:
            for command in self._required_commands():
                leader.submit_command(command, lambda error, c=command: self._answered(c, error))  # type: ignore[misc]
        self.world.timeline.after(ROUND_S, self._act)

    def _answered(self, command: OperatorCommand, error: EverstepError | None) -> None:
        if error is None:
            self.world.observe(CommandAccepted(str(command.action), command.node or "", command.job or ""))

    def _required_commands(self) -> list[OperatorCommand]:
        leader = self.world.leader()
        assert leader is not None
        state = leader.state
        commands = []
        if state.fleet.breaker_reason:
            commands.append(self._command(OperatorAction.RESET_BREAKER))
        for node, record in state.nodes.items():
            is_waiting = record.quarantine.needs_operator or record.state in (NodeState.HELD, NodeState.REPAIR)
            is_excluded = any(node in job.membership.excluded_nodes for job in state.jobs.values())
            is_unusable = any(
                node in job.membership.launchers and not job.membership.launchers[node].usable
                for job in state.jobs.values()
            )
            if is_waiting or is_excluded or (is_unusable and record.state is NodeState.HEALTHY):
                commands.append(self._command(OperatorAction.READMIT, node=node))
        for name, job in state.jobs.items():
            limit = job.membership.node_limit
            if limit is not None and limit < job.spec.max_nodes and job.status.state in UNFINISHED:
                commands.append(self._command(OperatorAction.RESIZE_JOB, job=name, size=job.spec.max_nodes))
        return commands

    def _command(
        self, action: OperatorAction, node: str | None = None, job: str | None = None, size: int | None = None
    ) -> OperatorCommand:
        trace = self.world.trace_id("operators")
        return OperatorCommand(
            action=action, actor="operators", reason="repaired", node=node, job=job, node_limit=size, trace=trace
        )
