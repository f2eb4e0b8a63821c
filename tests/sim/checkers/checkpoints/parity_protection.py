"""Check that both parity nodes of every group made the parity of a protected version.

The version can be restored as long as no group lost more nodes than it tolerates.
"""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import ProtectVersion
from everstep.wire.v1.vault_reports import Protection
from everstep_controller.core.checkpoints.parity import TOLERATED_LOSSES, form_groups
from everstep_controller.core.checkpoints.placement import FailureDomains
from everstep_controller.core.records import JobRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.committed_versions import CommittedVersions
from tests.sim.checkers.data_losses import DataLosses
from tests.sim.cluster.observations import (
    BatchWritten,
    DirectiveDelivered,
    FaultInjected,
    MemoryLost,
    ParityMade,
    RestoreFailed,
)

SHARD_AGE_S = 30.0
"""Seconds before its protection within which a version's shards were made."""


class ParityProtection(Checker):
    """Track the parity that nodes made, the machines that lost data since, and the durable commits."""

    name = "parity_protection"

    def __init__(self) -> None:
        self._committed = CommittedVersions()
        self._made: dict[tuple[str, Version, int, str], str] = {}
        self._given_up: set[tuple[str, str]] = set()
        self._protected: dict[str, Version] = {}
        self._protected_at: dict[tuple[str, Version], float] = {}
        self._data_losses = DataLosses()

    def handlers(self) -> Handlers:
        return {
            BatchWritten: self._on_write,
            DirectiveDelivered: self._on_delivery,
            ParityMade: self._on_parity,
            MemoryLost: self._on_loss,
            FaultInjected: self._on_loss,
            RestoreFailed: self._on_failed_restore,
        }

    def _on_parity(self, parity: ParityMade) -> None:
        self._made[parity.job, parity.version, parity.group, parity.node] = parity.members_digest

    def _on_delivery(self, delivery: DirectiveDelivered) -> None:
        if isinstance(delivery.body, ProtectVersion):
            self._committed.require(self.name, delivery.node, delivery.body, "protect")

    def _on_write(self, write: BatchWritten) -> None:
        self._committed.note(write)
        for entry in write.batch.event_log:
            if entry.kind == "parity.given_up":
                version = msgspec.json.decode(entry.detail, type=dict[str, str])["version"]
                self._given_up.add((entry.job, version))
        for name, doc in write.batch.jobs.items():
            job = msgspec.json.decode(doc, type=JobRecord)
            if job.parity.active is not None:
                self._check_protection(name, job.parity.active.protection)

    def _check_protection(self, job: str, protection: Protection) -> None:
        version = protection.version
        if self._protected.get(job) == version:
            return
        before = self._protected.get(job)
        if before is not None and version < before:
            raise Violation(self.name, f"{job}: {version} is protected after {before}")
        if (job, str(version)) in self._given_up:
            raise Violation(self.name, f"{job}: {version} was given up, and counts as protected")
        for group in protection.shards():
            p, q = (self._made.get((job, version, group.group, node)) for node in group.parity)
            if p is None or p != q:
                raise Violation(
                    self.name, f"{job}: {version} counts as protected, and not both parity nodes of {group} made parity"
                )
        self._protected[job] = version
        self._protected_at[job, version] = self.world.timeline.now

    def _on_loss(self, loss: MemoryLost | FaultInjected) -> None:
        self._data_losses.note(self.world, loss)

    def _on_failed_restore(self, failure: RestoreFailed) -> None:
        """Check that a group lost more shards than it tolerates, or that a node outside all groups lost its shard."""
        spec, protection = failure.spec, failure.spec.restore.protection
        protected_at = self._protected_at.get((spec.job, protection.version)) if protection is not None else None
        if protection is None or protected_at is None:
            return
        lost = {node for node in protection.seats if self._has_lost_data(node, spec, protected_at)}
        parity_nodes = {node for group in protection.groups for node in group.parity}
        lost |= {node for node in parity_nodes if self._has_lost_data(node, spec, protected_at)}
        grouped = {node for group in protection.groups for node in group.members}
        is_tolerated = all(len(lost & set(group.nodes)) <= TOLERATED_LOSSES for group in protection.groups)
        if is_tolerated and not lost & (set(protection.seats) - grouped):
            raise Violation(
                self.name,
                f"{spec.job} generation {spec.number}: {protection.version} is protected, only "
                f"{sorted(lost)} lost data, and it cannot be restored: {failure.sentence}",
            )

    def _has_lost_data(self, node: str, spec: Any, since: float) -> bool:
        machine, reader = self.world.machines[node], spec.roster[0].node
        is_holder = any(holder.node == node for holder in spec.holders)
        is_running = is_holder and machine.has_power and not machine.is_frozen
        answers = is_running and self.world.network.connected(reader, node)
        return not answers or node in self._data_losses.since(since - SHARD_AGE_S)

    def remaining_problem(self) -> str:
        """Return a job without parity, although it asks for parity and has enough nodes."""
        leader = self.world.leader()
        if leader is None:
            return "no controller leads"
        for name, job in leader.state.jobs.items():
            running = job.generation
            if job.status.state is not JobState.RUNNING or running is None or not job.spec.parity_group_size:
                continue
            domains = {node: FailureDomains.of(leader.state.nodes[node]) for node in running.seats}
            can_protect = form_groups(running.seats, domains, job.spec.parity_group_size).groups
            active = job.parity.active
            is_protected = active is not None and active.protection.version.generation == running.number
            if can_protect and not is_protected:
                return f"{name} has no protected version of generation {running.number}: {job.parity.error}"
        return ""
