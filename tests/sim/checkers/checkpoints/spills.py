"""Check that stored versions are complete on storage, that each spill ends once, and that a checkpoint remains."""

from __future__ import annotations

import msgspec

from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import SpillVersion
from everstep_controller.core.records import JobRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.committed_versions import CommittedVersions
from tests.sim.cluster.observations import (
    BatchWritten,
    CheckpointCompleted,
    CheckpointMissing,
    DirectiveDelivered,
    StateRestored,
)

MAX_STEPS_LATE = 60
"""Steps beyond the checkpoint interval after which a missing checkpoint is an error in a world without faults."""
FINAL_KINDS = ("spill.stored", "spill.given_up")
"""Kinds of log entries that end a spill."""


class Spills(Checker):
    """Track durable commits, the versions that vaults completed on storage, and the ends of spills."""

    name = "spills"

    def __init__(self) -> None:
        self._committed = CommittedVersions()
        self._complete: dict[str, set[Version]] = {}
        self._ended: dict[tuple[str, str], str] = {}

    def handlers(self) -> Handlers:
        return {
            BatchWritten: self._on_write,
            CheckpointCompleted: self._on_checkpoint,
            CheckpointMissing: self._on_missing_checkpoint,
            DirectiveDelivered: self._on_delivery,
            StateRestored: self._on_restore,
        }

    def _on_checkpoint(self, checkpoint: CheckpointCompleted) -> None:
        self._complete.setdefault(checkpoint.job, set()).add(checkpoint.version)
        if not checkpoint.remaining:
            raise Violation(
                self.name,
                f"{checkpoint.job}: no checkpoint remains on storage after the removal of {checkpoint.removed}",
            )

    def _on_delivery(self, delivery: DirectiveDelivered) -> None:
        if isinstance(delivery.body, SpillVersion):
            self._committed.require(self.name, delivery.node, delivery.body, "store")

    def _on_write(self, write: BatchWritten) -> None:
        self._committed.note(write)
        for entry in write.batch.event_log:
            if entry.kind in FINAL_KINDS:
                self._note_end(entry.job, entry.kind, entry.detail)
        for name, doc in write.batch.jobs.items():
            job = msgspec.json.decode(doc, type=JobRecord)
            self._forget_removed(name, {str(stored.version) for stored in job.spills.stored})
            for stored in job.spills.stored:
                if stored.version not in self._complete.get(name, ()):
                    raise Violation(
                        self.name, f"{name}: {stored.version} counts as stored, and no vault has completed it"
                    )

    def _forget_removed(self, job: str, stored: set[str]) -> None:
        """Forget stored versions that retention has removed: one of them may be stored again at the job's end."""
        for name, version in [key for key, kind in self._ended.items() if kind == "spill.stored"]:
            if name == job and version not in stored:
                del self._ended[name, version]

    def _note_end(self, job: str, kind: str, detail: str) -> None:
        version = msgspec.json.decode(detail, type=dict[str, str]).get("version", "")
        before = self._ended.get((job, version)) if version else None
        if before == "spill.stored":  # a version that was given up may be ordered once more, at the job's end
            raise Violation(self.name, f"{job}: the spill of {version} ended as {before}, and then as {kind}")
        self._ended[job, version] = kind

    def _on_missing_checkpoint(self, missing: CheckpointMissing) -> None:
        spec = missing.spec
        raise Violation(
            self.name,
            f"{spec.job} generation {spec.number} is to start from {spec.restore.storage_url}, which does not exist",
        )

    def _on_restore(self, restore: StateRestored) -> None:
        if restore.storage and restore.storage != restore.spec.restore.storage_url:
            raise Violation(
                self.name, f"{restore.spec.job} starts from {restore.storage}, not from its generation's URL"
            )

    def remaining_problem(self) -> str:
        """Return a job that lists missing checkpoints, or that has no recent one."""
        leader = self.world.leader()
        if leader is None:
            return "no controller leads"
        for name, job in leader.state.jobs.items():
            runtime = leader.state.job_runtime[name]
            root = f"{job.spec.spill.url}/{name}" if job.spec.spill is not None else ""
            loadable = self.world.storage.complete_checkpoints(root)
            if missing_urls := [stored.url for stored in job.spills.stored if stored.url not in loadable]:
                return f"{name} lists {', '.join(missing_urls)}, which do not exist"
            if (
                job.status.state is not JobState.RUNNING
                or job.spec.spill is None
                or runtime.commits.committed_version is None
            ):
                continue
            steps_late = abs(runtime.commits.committed_version.step - job.spills.last_step)
            if steps_late > job.spec.spill.every_steps + MAX_STEPS_LATE:
                return f"{name} has stored nothing for {steps_late} steps: {job.spills.error or 'no error is known'}"
        return ""
