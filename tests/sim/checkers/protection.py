"""What counts as kept by parity was made by both homes of every group; what is gone back to is still there."""

from __future__ import annotations

from typing import Any

import msgspec
from everstep_controller.core.checkpoints.parity import TOLERATED_LOSSES, form_groups
from everstep_controller.core.checkpoints.placement import FailureDomains
from everstep_controller.core.records import JobRecord

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import ProtectVersion
from everstep.wire.v1.vault_reports import Protection
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.committed import Committed
from tests.sim.checkers.harm import Harm
from tests.sim.facts import Violation


class Parities(Checker):
    """Knows who made parity of what, which machines were harmed since, and what was committed durably."""

    name = "protection"

    def __init__(self) -> None:
        self._committed = Committed()
        self._made: dict[tuple[str, Version, int, str], str] = {}
        self._given_up: set[tuple[str, str]] = set()
        self._shielded: dict[str, Version] = {}
        self._counted_at: dict[tuple[str, Version], float] = {}
        self._harm = Harm()

    def watches(self) -> Watches:
        return {
            facts.Durable: self._durable,
            facts.Delivered: self._delivered,
            facts.ParityMade: self._parity,
            facts.MemoryLost: self._harmed,
            facts.FaultBegan: self._harmed,
            facts.Unrestorable: self._unrestorable,
        }

    def _parity(self, fact: facts.ParityMade) -> None:
        self._made[fact.job, fact.version, fact.group, fact.node] = fact.members

    def _delivered(self, fact: facts.Delivered) -> None:
        if isinstance(fact.body, ProtectVersion):
            self._committed.require(self.name, fact.node, fact.body, "protect")

    # --- what counts -------------------------------------------------------------------------------------------------

    def _durable(self, fact: facts.Durable) -> None:
        self._committed.note(fact)
        for audit in fact.batch.audit:
            if audit.kind == "parity.given_up":
                version = msgspec.json.decode(audit.detail, type=dict[str, str])["version"]
                self._given_up.add((audit.job, version))
        for name, doc in fact.batch.jobs.items():
            job = msgspec.json.decode(doc, type=JobRecord)
            if job.parity.active is not None:
                self._counts(name, job.parity.active.protection)

    def _counts(self, job: str, protection: Protection) -> None:
        version = protection.version
        if self._shielded.get(job) == version:
            return
        before = self._shielded.get(job)
        if before is not None and version < before:
            raise Violation(self.name, f"{job}: {version} is kept by parity after {before}")
        if (job, str(version)) in self._given_up:
            raise Violation(self.name, f"{job}: {version} was given up, and counts as kept by parity")
        for group in protection.shards():
            p, q = (self._made.get((job, version, group.group, home)) for home in group.parity)
            if p is None or p != q:
                raise Violation(
                    self.name, f"{job}: {version} counts as kept by parity, and not both homes of {group} made it"
                )
        self._shielded[job] = version
        self._counted_at[job, version] = self.world.timeline.now

    # --- what is gone back to ----------------------------------------------------------------------------------------

    def _harmed(self, fact: facts.MemoryLost | facts.FaultBegan) -> None:
        self._harm.note(self.world, fact)

    def _unrestorable(self, fact: facts.Unrestorable) -> None:
        """Never where each group has lost no more than it bears, and who is in no group has lost nothing."""
        spec, protection = fact.spec, fact.spec.restore.protection
        counted_at = self._counted_at.get((spec.job, protection.version)) if protection is not None else None
        if protection is None or counted_at is None:
            return
        lost = {node for node in protection.seats if self._lost(node, spec, counted_at)}
        homes = {home for group in protection.groups for home in group.parity}
        lost |= {home for home in homes if self._lost(home, spec, counted_at)}
        grouped = {node for group in protection.groups for node in group.members}
        borne = all(len(lost & set(group.nodes)) <= TOLERATED_LOSSES for group in protection.groups)
        if borne and not lost & (set(protection.seats) - grouped):
            raise Violation(
                self.name,
                f"{spec.job} generation {spec.number}: {protection.version} is kept by parity, lost are only "
                f"{sorted(lost)}, and it is not whole: {fact.sentence}",
            )

    def _lost(self, node: str, spec: Any, since: float) -> bool:
        machine, chair = self.world.machines[node], spec.roster[0].node
        known = any(holder.node == node for holder in spec.holders)
        answers = known and machine.power and not machine.frozen and self.world.wires.connected(chair, node)
        return not answers or node in self._harm.since(since - 30.0)

    def complaint(self) -> str:
        """Once nothing breaks any more, whoever asks for parity, and has the nodes for it, has some."""
        leader = self.world.leader()
        if leader is None:
            return "nobody leads"
        for name, job in leader.state.jobs.items():
            running = job.generation
            if job.status.state is not JobState.RUNNING or running is None or not job.spec.parity_group_size:
                continue
            sites = {node: FailureDomains.of(leader.state.nodes[node]) for node in running.seats}
            possible = form_groups(running.seats, sites, job.spec.parity_group_size).groups
            recent = job.parity.active is not None and job.parity.active.protection.version.generation == running.number
            if possible and not recent:
                return f"{name} keeps no version of generation {running.number} by parity: {job.parity.error}"
        return ""
