"""No rank commits a step in two generations; what speaks for a generation that is over is not counted."""

from __future__ import annotations

from collections import defaultdict

from everstep_controller.core.effects import PutGeneration, PutJob, PutVersion
from everstep_controller.core.events import ReportArrived
from everstep_controller.core.records import VersionRecord

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec, VersionSealed
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class Fencing(Checker):
    """A process goes from generation to generation and never back. A version is committed in its own generation only,
    when every one of its ranks has finished that step there, and has said that it keeps it, and that it is safe, and
    when no digests differ."""

    name = "fencing"

    def __init__(self) -> None:
        self._entered: dict[int, int] = {}
        self._at: dict[int, tuple[int, int]] = {}
        self._stepped: dict[tuple[str, Version], set[int]] = defaultdict(set)
        self._kept: dict[tuple[str, Version], set[int]] = defaultdict(set)
        self._digests: dict[tuple[str, Version], dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        self._specs: dict[str, GenerationSpec] = {}
        self._decided: dict[tuple[str, int], GenerationSpec] = {}
        self._stored: dict[str, GenerationSpec] = {}
        self._votes_off: dict[str, bool] = {}

    def watches(self) -> Watches:
        return {
            facts.Entered: self._enter,
            facts.Stepped: self._step,
            facts.Decided: self._handled,
            facts.TookOver: self._took_over,
            facts.Durable: self._durable,
        }

    def _enter(self, fact: facts.Entered) -> None:
        before = self._entered.get(fact.life, 0)
        if fact.spec.number <= before:
            raise Violation(self.name, f"a process on {fact.node} enters {fact.spec.number} after {before}")
        self._entered[fact.life] = fact.spec.number

    def _step(self, fact: facts.Stepped) -> None:
        where = f"{fact.job} rank {fact.rank} on {fact.node}"
        if self._entered.get(fact.life) != fact.generation:
            raise Violation(self.name, f"{where} steps in {fact.generation}, having entered {self._entered[fact.life]}")
        before = self._at.get(fact.life, (0, -1))
        if fact.generation == before[0] and fact.step != before[1] + 1:
            raise Violation(self.name, f"{where} finished step {fact.step} after {before[1]}")
        self._at[fact.life] = (fact.generation, fact.step)
        self._stepped[fact.job, Version(fact.generation, fact.step)].add(fact.rank)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._kept.clear()
        self._digests.clear()
        self._specs = dict(self._stored)

    def _durable(self, fact: facts.Durable) -> None:
        for row in fact.batch.generations:
            self._stored[row.job] = self._decided[row.job, row.number]

    def _handled(self, fact: facts.Decided) -> None:
        event = fact.event
        if isinstance(event, ReportArrived) and isinstance(event.body, VersionSealed):
            self._sealed(event.body)
        for effect in fact.effects:
            if isinstance(effect, PutGeneration):
                self._specs[effect.spec.job] = effect.spec
                self._decided[effect.spec.job, effect.spec.number] = effect.spec
            elif isinstance(effect, PutVersion) and effect.doc.audited_at is None:
                self._commit(effect.doc.job, effect.doc.version)
                self._compared(effect.doc)
            elif isinstance(effect, PutJob):
                self._votes_off[effect.doc.job] = bool(effect.doc.audits.voting_off_reason)

    def _sealed(self, seal: VersionSealed) -> None:
        name = seal.job, seal.version
        if seal.commit_candidate and seal.durable:
            self._kept[name].add(seal.rank)
        for group, digest in seal.digests.items():
            self._digests[name][group][seal.rank] = digest

    def _commit(self, job: str, version: Version) -> None:
        spec = self._specs[job]
        if version.generation != spec.number:
            raise Violation(self.name, f"{job}: {version} is committed in generation {spec.number}")
        ranks = set(range(spec.world_size))
        if missing := ranks - self._stepped[job, version]:
            raise Violation(self.name, f"{job}: {version} is committed, and ranks {sorted(missing)} never finished it")
        if missing := ranks - self._kept[job, version]:
            raise Violation(self.name, f"{job}: {version} is committed, and ranks {sorted(missing)} do not keep it")

    def _compared(self, doc: VersionRecord) -> None:
        """Check that digests of replicas agree, unless votes are off, and that a verified version was compared."""
        groups = self._digests[doc.job, doc.version].values()
        if self._votes_off.get(doc.job) and doc.verified_at is None:
            return
        if differ := [sorted(votes) for votes in groups if len(set(votes.values())) > 1]:
            raise Violation(self.name, f"{doc.job}: {doc.version} is committed, and digests of ranks {differ} differ")
        compared = {rank for votes in groups if len(votes) > 1 for rank in votes}
        if doc.verified_at is not None and (alone := set(range(doc.rank_count)) - compared):
            words = f"{doc.version} is verified, and ranks {sorted(alone)} were compared with nobody"
            raise Violation(self.name, f"{doc.job}: {words}")
