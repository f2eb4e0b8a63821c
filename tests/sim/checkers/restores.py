"""A restored version is whole, not older than what was committed, and, after corruption, clean."""

from __future__ import annotations

from everstep_controller.core.effects import PutGeneration

from everstep.ids import Version
from everstep.layout.stored_checkpoints import parse_folder_name
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.harm import Harm
from tests.sim.facts import Violation


class Restores(Checker):
    """Knows what was committed durably, which machines lost their memory since, and which states are wrong."""

    name = "restores"

    def __init__(self) -> None:
        self._committed: dict[str, Version] = {}
        self._holders: dict[tuple[str, int], set[str]] = {}
        self._expected: dict[tuple[str, int], Version | None] = {}
        self._finished_at: dict[tuple[str, Version], float] = {}
        self._harm = Harm()
        self._spread: dict[str, frozenset[str]] = {}

    def watches(self) -> Watches:
        return {
            facts.Durable: self._durable,
            facts.Handled: self._handled,
            facts.Restored: self._restored,
            facts.Unrestorable: self._unrestorable,
            facts.MemoryLost: self._harmed,
            facts.FaultBegan: self._harmed,
            facts.Stepped: self._step,
        }

    def _durable(self, fact: facts.Durable) -> None:
        for row in fact.batch.versions.values():
            version = Version(row.generation, row.step)
            self._committed[row.job] = max(version, self._committed.get(row.job, version))
        for audit in fact.batch.audit:
            if audit.kind == "job.created":
                self._committed.pop(audit.job, None)

    def _handled(self, fact: facts.Handled) -> None:
        for effect in fact.effects:
            if isinstance(effect, PutGeneration):
                spec = effect.spec
                self._expected[spec.job, spec.number] = self._committed.get(spec.job)
                self._holders[spec.job, spec.number] = {member.node for member in spec.roster}

    def _restored(self, fact: facts.Restored) -> None:
        spec, version = fact.spec, fact.version
        what = f"{spec.job} generation {spec.number} starts from {fact.storage or version}"
        if fact.torn:
            raise Violation(self.name, f"{what}, whose shares are of different states")
        begun = parse_folder_name(fact.storage.rpartition("/")[2]) if fact.storage else version
        if fact.state.step != (begun.step if begun is not None else 0):
            raise Violation(self.name, f"{what}, whose state is that after step {fact.state.step}")
        rule = spec.restore
        if rule.ceiling is not None and version is not None and version > rule.ceiling:
            raise Violation(self.name, f"{what}, above the ceiling {rule.ceiling}")
        known = self._expected.get((spec.job, spec.number))
        after_corruption = rule.ceiling is not None or rule.from_scratch or spec.reason is GenerationReason.CORRUPTION
        if known is not None and not after_corruption and (version is None or version < known):
            protection = rule.protection
            if not fact.storage and (protection is None or version != protection.version):
                raise Violation(self.name, f"{what}, although {known} was committed before")
            self._must_be_lost(spec, f"{what}, as what is kept besides")
        self._taint(fact, begun, after_corruption)

    def _taint(self, fact: facts.Restored, begun: Version | None, after_corruption: bool) -> None:
        """What was restored by all alike cannot be told from right values afterwards, also where a job that is run once
        more finds it on storage, nor what a node computed alone; only that is forgiven."""
        job = fact.spec.job
        made_on = self._holders.get((job, begun.generation), set()) if begun is not None else set()
        alike = made_on if len(made_on) == 1 else set()
        seen = fact.state.liars - self._spread.get(job, frozenset()) - alike
        replicated = self.world.jobs[job].replicated
        audited = fact.spec.spec.keeps_audited_version  # all are wrong alike; the checker ``audits`` looks at these
        if after_corruption and seen and replicated and not audited:
            raise Violation(self.name, f"{job} generation {fact.spec.number} starts from what {sorted(seen)} got wrong")
        self._spread[job] = fact.state.liars

    # --- what cannot be restored -------------------------------------------------------------------------------------

    def _step(self, fact: facts.Stepped) -> None:
        version = Version(fact.generation, fact.step)
        self._finished_at.setdefault((fact.job, version), self.world.timeline.now)

    def _harmed(self, fact: facts.MemoryLost | facts.FaultBegan) -> None:
        self._harm.note(self.world, fact)

    def _unrestorable(self, fact: facts.Unrestorable) -> None:
        self._must_be_lost(fact.spec, fact.sentence)

    def _must_be_lost(self, spec: GenerationSpec, sentence: str) -> None:
        """Only when as many machines as there are copies are gone, out of reach, or not to be believed."""
        floor = spec.restore.floor
        if floor is None:
            return
        holders = self._holders.get((spec.job, floor.generation), set())
        chair = spec.roster[0].node
        since = self._finished_at.get((spec.job, floor), 0.0)
        lost = self._harm.since(since)
        asked = {holder.node for holder in spec.holders}
        for node in holders:
            machine = self.world.machines[node]
            if node not in asked or not machine.power or machine.frozen or not self.world.wires.connected(chair, node):
                lost.add(node)
        if len(lost & holders) < min(spec.spec.replicas, len(holders)):
            raise Violation(
                self.name,
                f"{spec.job} generation {spec.number}: {floor} was committed on {sorted(holders)}, of which only "
                f"{sorted(lost & holders)} lost it, and is not whole: {sentence}",
            )
