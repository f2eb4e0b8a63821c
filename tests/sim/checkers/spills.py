"""What counts as stored is whole on storage; an order is carried out or given up; retention leaves a checkpoint."""

from __future__ import annotations

import msgspec
from everstep_controller.core.records import JobRecord

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import SpillVersion
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.committed import Committed
from tests.sim.facts import Violation

STEPS_LATE = 60
"""Steps, besides those between two checkpoints, after which one of a quiet world is missed."""
ENDS = ("spill.stored", "spill.given_up")


class Spills(Checker):
    """Knows what was committed, what vaults made whole, and how orders ended, all as far as it is durable."""

    name = "spills"

    def __init__(self) -> None:
        self._committed = Committed()
        self._whole: dict[str, set[Version]] = {}
        self._ended: dict[tuple[str, str], str] = {}

    def watches(self) -> Watches:
        return {
            facts.Durable: self._durable,
            facts.StoredWhole: self._stored,
            facts.StorageBare: self._bare,
            facts.Delivered: self._delivered,
            facts.Restored: self._restored,
        }

    def _stored(self, fact: facts.StoredWhole) -> None:
        self._whole.setdefault(fact.job, set()).add(fact.version)
        if not fact.left:
            raise Violation(self.name, f"{fact.job}: with {fact.removed} the last checkpoint on storage was removed")

    def _delivered(self, fact: facts.Delivered) -> None:
        if isinstance(fact.body, SpillVersion):
            self._committed.require(self.name, fact.node, fact.body, "store")

    def _durable(self, fact: facts.Durable) -> None:
        self._committed.note(fact)
        for audit in fact.batch.audit:
            if audit.kind in ENDS:
                self._end(audit.job, audit.kind, audit.detail)
        for name, doc in fact.batch.jobs.items():
            job = msgspec.json.decode(doc, type=JobRecord)
            for one in job.spills.stored:
                if one.version not in self._whole.get(name, ()):
                    raise Violation(self.name, f"{name}: {one.version} counts as stored, and no vault made it whole")

    def _end(self, job: str, kind: str, detail: str) -> None:
        version = msgspec.json.decode(detail, type=dict[str, str]).get("version", "")
        before = self._ended.get((job, version)) if version else None
        if before is not None:
            raise Violation(self.name, f"{job}: the order to store {version} ended as {before}, and then as {kind}")
        self._ended[job, version] = kind

    def _bare(self, fact: facts.StorageBare) -> None:
        spec = fact.spec
        raise Violation(
            self.name,
            f"{spec.job} generation {spec.number} is to start from {spec.restore.storage_url}, which is not there",
        )

    def _restored(self, fact: facts.Restored) -> None:
        if fact.storage and fact.storage != fact.spec.restore.storage_url:
            raise Violation(self.name, f"{fact.spec.job} starts from {fact.storage}, of which nobody told it")

    def complaint(self) -> str:
        """Once nothing breaks any more checkpoints come to storage, and what the records list is there."""
        leader = self.world.leader()
        if leader is None:
            return "nobody leads"
        for name, job in leader.state.jobs.items():
            live = leader.state.job_runtime[name]
            root = f"{job.spec.spill.url}/{name}" if job.spec.spill is not None else ""
            there = self.world.storage.whole(root)
            if gone := [one.url for one in job.spills.stored if one.url not in there]:
                return f"{name} would go back to {', '.join(gone)}, and nothing is there"
            if (
                job.status.state is not JobState.RUNNING
                or job.spec.spill is None
                or live.commits.committed_version is None
            ):
                continue
            behind = abs(live.commits.committed_version.step - job.spills.last_step)
            if behind > job.spec.spill.every_steps + STEPS_LATE:
                return f"{name} has not stored anything for {behind} steps: {job.spills.error or 'no trouble is known'}"
        return ""
