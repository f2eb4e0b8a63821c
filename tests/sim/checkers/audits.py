"""After audits convicted a node, nothing is restored that it computed since the version that audits had verified."""

from __future__ import annotations

from everstep_controller.core.effects import PutGeneration, PutVerdict, PutVersion
from everstep_controller.core.events import ReportArrived

from everstep.ids import Version
from everstep.vocabulary import Decision, FindingKind
from everstep.wire.v1.training import AuditsClean
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class Audits(Checker):
    """Knows who said that its work was clean since when, what is verified by that, and who was convicted."""

    name = "audits"

    def __init__(self) -> None:
        self._clean: dict[tuple[str, int], dict[int, int]] = {}
        self._verified: dict[str, Version] = {}
        self._stored: dict[str, Version] = {}
        self._barred: dict[str, tuple[int, Version, frozenset[str]]] = {}
        self._specs: dict[str, int] = {}
        self._worlds: dict[tuple[str, int], int] = {}

    def watches(self) -> Watches:
        return {
            facts.Decided: self._decided,
            facts.Durable: self._durable,
            facts.TookOver: self._took_over,
            facts.Restored: self._restored,
        }

    def _durable(self, fact: facts.Durable) -> None:
        for row in fact.batch.versions.values():
            if row.audited_at is not None:
                self._stored[row.job] = Version(row.generation, row.step)
        for audit in fact.batch.audit:
            if audit.kind == "job.created":
                for known in (self._verified, self._stored, self._barred):
                    known.pop(audit.job, None)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._verified = dict(self._stored)

    def _decided(self, fact: facts.Decided) -> None:
        event = fact.event
        if isinstance(event, ReportArrived) and isinstance(event.body, AuditsClean):
            said = self._clean.setdefault((event.body.job, event.body.generation), {})
            said[event.body.rank] = max(event.body.step, said.get(event.body.rank, 0))
        before = dict(self._specs)
        for effect in fact.effects:
            if isinstance(effect, PutGeneration):
                self._specs[effect.spec.job] = effect.spec.number
                self._worlds[effect.spec.job, effect.spec.number] = effect.spec.world_size
            elif isinstance(effect, PutVersion) and effect.doc.audited_at is not None:
                assert isinstance(event, ReportArrived)
                assert isinstance(event.body, AuditsClean)
                self._verify(effect.doc.job, effect.doc.version, event.body.generation)
        for effect in fact.effects:
            if isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT:
                for found in effect.verdict.evidence:
                    if found.kind is FindingKind.AUDIT_MISMATCH and "job" in found.evidence:
                        self._convict(found.evidence["job"], effect.verdict.node, before)

    def _verify(self, job: str, version: Version, generation: int) -> None:
        said = self._clean.get((job, generation), {})
        silent = [rank for rank in range(self._worlds[job, generation]) if said.get(rank, -1) < version.step]
        if silent:
            raise Violation(self.name, f"{job}: {version} is verified, and ranks {silent} were not audited since")
        self._verified[job] = version

    def _convict(self, job: str, node: str, before: dict[str, int]) -> None:
        verified, number, was = self._verified.get(job), self._specs.get(job), before.get(job)
        if verified is not None and number is not None and was is not None and number > was:
            self._barred[job] = number, verified, frozenset({f"{node}@{was}"})

    def _restored(self, fact: facts.Restored) -> None:
        job, version = fact.spec.job, fact.version
        if job not in self._barred:
            return
        number, verified, wrong = self._barred[job]
        if version is None or fact.spec.number < number or version.generation >= number:
            return
        what = f"{job} generation {fact.spec.number} starts from {version}"
        if version > verified:
            raise Violation(self.name, f"{what} after a conviction, and audits had verified {verified}")
        if wrong & fact.state.liars:
            raise Violation(self.name, f"{what}, which {sorted(wrong & fact.state.liars)} computed")
