"""Check that no rank commits a step in two generations, and that a commit has every rank's report."""

from __future__ import annotations

from collections import defaultdict

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec, VersionSealed
from everstep_controller.core.effects import PutGeneration, PutJob, PutVersion
from everstep_controller.core.events import ReportArrived
from everstep_controller.core.records import VersionRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import (
    BatchWritten,
    GenerationEntered,
    LeaderDecided,
    LeaderStarted,
    StepFinished,
)


class Fencing(Checker):
    """Compare commits with the steps and reports of ranks.

    A process never returns to an older generation. A version is committed only in its own generation: every rank has
    finished the step there and reported a durable copy, and no digests differ.
    """

    name = "fencing"

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}
        self._last_step: dict[int, tuple[int, int]] = {}
        self._finished_ranks: dict[tuple[str, Version], set[int]] = defaultdict(set)
        self._durable_ranks: dict[tuple[str, Version], set[int]] = defaultdict(set)
        self._digests: dict[tuple[str, Version], dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        self._specs: dict[str, GenerationSpec] = {}
        self._decided: dict[tuple[str, int], GenerationSpec] = {}
        self._stored: dict[str, GenerationSpec] = {}
        self._is_voting_off: dict[str, bool] = {}

    def handlers(self) -> Handlers:
        return {
            GenerationEntered: self._on_entry,
            StepFinished: self._on_step,
            LeaderDecided: self._on_decision,
            LeaderStarted: self._on_leader,
            BatchWritten: self._on_write,
        }

    def _on_entry(self, entry: GenerationEntered) -> None:
        before = self._generations.get(entry.pid, 0)
        if entry.spec.number <= before:
            raise Violation(self.name, f"a process on {entry.node} enters {entry.spec.number} after {before}")
        self._generations[entry.pid] = entry.spec.number

    def _on_step(self, finished: StepFinished) -> None:
        where = f"{finished.job} rank {finished.rank} on {finished.node}"
        if self._generations.get(finished.pid) != finished.generation:
            raise Violation(
                self.name, f"{where} steps in {finished.generation}, having entered {self._generations[finished.pid]}"
            )
        before = self._last_step.get(finished.pid, (0, -1))
        if finished.generation == before[0] and finished.step != before[1] + 1:
            raise Violation(self.name, f"{where} finished step {finished.step} after {before[1]}")
        self._last_step[finished.pid] = (finished.generation, finished.step)
        self._finished_ranks[finished.job, Version(finished.generation, finished.step)].add(finished.rank)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._durable_ranks.clear()
        self._digests.clear()
        self._specs = dict(self._stored)

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.generations:
            self._stored[row.job] = self._decided[row.job, row.number]

    def _on_decision(self, decision: LeaderDecided) -> None:
        event = decision.event
        if isinstance(event, ReportArrived) and isinstance(event.body, VersionSealed):
            self._note_seal(event.body)
        for effect in decision.effects:
            if isinstance(effect, PutGeneration):
                self._specs[effect.spec.job] = effect.spec
                self._decided[effect.spec.job, effect.spec.number] = effect.spec
            elif isinstance(effect, PutVersion) and effect.doc.audited_at is None:
                self._check_commit(effect.doc.job, effect.doc.version)
                self._check_digests(effect.doc)
            elif isinstance(effect, PutJob):
                self._is_voting_off[effect.doc.job] = bool(effect.doc.audits.voting_off_reason)

    def _note_seal(self, seal: VersionSealed) -> None:
        name = seal.job, seal.version
        if seal.commit_candidate and seal.durable:
            self._durable_ranks[name].add(seal.rank)
        for group, digest in seal.digests.items():
            self._digests[name][group][seal.rank] = digest

    def _check_commit(self, job: str, version: Version) -> None:
        spec = self._specs[job]
        if version.generation != spec.number:
            raise Violation(self.name, f"{job}: {version} is committed in generation {spec.number}")
        ranks = set(range(spec.world_size))
        if missing := ranks - self._finished_ranks[job, version]:
            raise Violation(self.name, f"{job}: {version} is committed, and ranks {sorted(missing)} did not finish it")
        if missing := ranks - self._durable_ranks[job, version]:
            detail = f"{version} is committed, and ranks {sorted(missing)} have no durable copy of it"
            raise Violation(self.name, f"{job}: {detail}")

    def _check_digests(self, doc: VersionRecord) -> None:
        """Check that digests of replicas agree, unless votes are off, and that a verified version was compared."""
        groups = self._digests[doc.job, doc.version].values()
        if self._is_voting_off.get(doc.job) and doc.verified_at is None:
            return
        if different := [sorted(votes) for votes in groups if len(set(votes.values())) > 1]:
            raise Violation(
                self.name, f"{doc.job}: {doc.version} is committed, and digests of ranks {different} differ"
            )
        compared = {rank for votes in groups if len(votes) > 1 for rank in votes}
        if doc.verified_at is not None and (unverified := set(range(doc.rank_count)) - compared):
            detail = f"{doc.version} is verified, and ranks {sorted(unverified)} were compared with no other rank"
            raise Violation(self.name, f"{doc.job}: {detail}")
