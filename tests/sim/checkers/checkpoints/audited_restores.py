"""Check that after a failed audit no version is restored that holds the node's work since the last verified version."""

from __future__ import annotations

from everstep.ids import Version
from everstep.vocabulary import Decision, FindingKind
from everstep.wire.v1.training import AuditsClean
from everstep_controller.core.effects import PutGeneration, PutVerdict, PutVersion
from everstep_controller.core.events import ReportArrived
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted, StateRestored


class AuditedRestores(Checker):
    """Track the clean audits of each rank, the versions that they verify, and the nodes that failed an audit."""

    name = "audited_restores"

    def __init__(self) -> None:
        self._clean_steps: dict[tuple[str, int], dict[int, int]] = {}
        self._verified: dict[str, Version] = {}
        self._stored_versions: dict[str, Version] = {}
        self._failed_audits: dict[str, tuple[int, Version, frozenset[str]]] = {}
        self._generations: dict[str, int] = {}
        self._world_sizes: dict[tuple[str, int], int] = {}

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
            StateRestored: self._on_restore,
        }

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.versions.values():
            if row.audited_at is not None:
                self._stored_versions[row.job] = Version(row.generation, row.step)
        for entry in write.batch.event_log:
            if entry.kind == "job.created":
                for versions in (self._verified, self._stored_versions, self._failed_audits):
                    versions.pop(entry.job, None)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._verified = dict(self._stored_versions)

    def _on_decision(self, decision: LeaderDecided) -> None:
        event = decision.event
        if isinstance(event, ReportArrived) and isinstance(event.body, AuditsClean):
            clean_steps = self._clean_steps.setdefault((event.body.job, event.body.generation), {})
            clean_steps[event.body.rank] = max(event.body.step, clean_steps.get(event.body.rank, 0))
        before = dict(self._generations)
        for effect in decision.effects:
            if isinstance(effect, PutGeneration):
                self._generations[effect.spec.job] = effect.spec.number
                self._world_sizes[effect.spec.job, effect.spec.number] = effect.spec.world_size
            elif isinstance(effect, PutVersion) and effect.doc.audited_at is not None:
                assert isinstance(event, ReportArrived)
                assert isinstance(event.body, AuditsClean)
                self._verify(effect.doc.job, effect.doc.version, event.body.generation)
        for effect in decision.effects:
            if isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT:
                for finding in effect.verdict.evidence:
                    if finding.kind is FindingKind.AUDIT_MISMATCH and "job" in finding.evidence:
                        self._note_failed_audit(finding.evidence["job"], effect.verdict.node, before)

    def _verify(self, job: str, version: Version, generation: int) -> None:
        clean_steps = self._clean_steps.get((job, generation), {})
        ranks = range(self._world_sizes[job, generation])
        unaudited = [rank for rank in ranks if clean_steps.get(rank, -1) < version.step]
        if unaudited:
            raise Violation(self.name, f"{job}: {version} is verified, and ranks {unaudited} were not audited since")
        self._verified[job] = version

    def _note_failed_audit(self, job: str, node: str, before: dict[str, int]) -> None:
        verified, number, previous = self._verified.get(job), self._generations.get(job), before.get(job)
        if verified is not None and number is not None and previous is not None and number > previous:
            self._failed_audits[job] = number, verified, frozenset({f"{node}@{previous}"})

    def _on_restore(self, restore: StateRestored) -> None:
        job, version = restore.spec.job, restore.version
        if job not in self._failed_audits:
            return
        number, verified, wrong = self._failed_audits[job]
        if version is None or restore.spec.number < number or version.generation >= number:
            return
        start = f"{job} generation {restore.spec.number} starts from {version}"
        if version > verified:
            raise Violation(self.name, f"{start} after a failed audit, and audits have verified only {verified}")
        if wrong & restore.state.wrong_nodes:
            raise Violation(self.name, f"{start}, which {sorted(wrong & restore.state.wrong_nodes)} computed")
