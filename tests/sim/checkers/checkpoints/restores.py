"""Check that a restored version is whole, not older than the committed one, and clean after corruption."""

from __future__ import annotations

from everstep.ids import Version
from everstep.layout.stored_checkpoints import parse_folder_name
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.effects import PutGeneration
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.data_losses import DataLosses
from tests.sim.cluster.observations import (
    BatchWritten,
    EventHandled,
    FaultInjected,
    MemoryLost,
    RestoreFailed,
    StateRestored,
    StepFinished,
)


class Restores(Checker):
    """Track durable commits, the machines that lost their memory since, and wrong states."""

    name = "restores"

    def __init__(self) -> None:
        self._committed: dict[str, Version] = {}
        self._holders: dict[tuple[str, int], set[str]] = {}
        self._expected: dict[tuple[str, int], Version | None] = {}
        self._finished_at: dict[tuple[str, Version], float] = {}
        self._data_losses = DataLosses()
        self._common_wrong_nodes: dict[str, frozenset[str]] = {}

    def handlers(self) -> Handlers:
        return {
            BatchWritten: self._on_write,
            EventHandled: self._on_event,
            StateRestored: self._on_restore,
            RestoreFailed: self._on_failed_restore,
            MemoryLost: self._on_loss,
            FaultInjected: self._on_loss,
            StepFinished: self._on_step,
        }

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.versions.values():
            version = Version(row.generation, row.step)
            self._committed[row.job] = max(version, self._committed.get(row.job, version))
        for entry in write.batch.event_log:
            if entry.kind == "job.created":
                self._committed.pop(entry.job, None)

    def _on_event(self, handled: EventHandled) -> None:
        for effect in handled.effects:
            if isinstance(effect, PutGeneration):
                spec = effect.spec
                self._expected[spec.job, spec.number] = self._committed.get(spec.job)
                self._holders[spec.job, spec.number] = {member.node for member in spec.roster}

    def _on_restore(self, restore: StateRestored) -> None:
        spec, version = restore.spec, restore.version
        start = f"{spec.job} generation {spec.number} starts from {restore.storage or version}"
        if restore.shares_differ:
            raise Violation(self.name, f"{start}, whose shares are of different states")
        restored = parse_folder_name(restore.storage.rpartition("/")[2]) if restore.storage else version
        if restore.state.step != (restored.step if restored is not None else 0):
            raise Violation(self.name, f"{start}, whose state is the one after step {restore.state.step}")
        rule = spec.restore
        if rule.ceiling is not None and version is not None and version > rule.ceiling:
            raise Violation(self.name, f"{start}, above the ceiling {rule.ceiling}")
        committed = self._expected.get((spec.job, spec.number))
        after_corruption = rule.ceiling is not None or rule.from_scratch or spec.reason is GenerationReason.CORRUPTION
        if committed is not None and not after_corruption and (version is None or version < committed):
            protection = rule.protection
            if not restore.storage and (protection is None or version != protection.version):
                raise Violation(self.name, f"{start}, although {committed} was committed before")
            self._check_loss(spec, f"{start}, as a protected or stored version")
        self._check_wrong_results(restore, restored, after_corruption)

    def _check_wrong_results(self, restore: StateRestored, restored: Version | None, after_corruption: bool) -> None:
        """Check that no detectable wrong result is restored after corruption.

        Wrong results are undetectable if all ranks restored the same ones before, also from storage in a new run, or if
        a node computed them as the only node of its job.
        """
        job = restore.spec.job
        makers = self._holders.get((job, restored.generation), set()) if restored is not None else set()
        undetectable = makers if len(makers) == 1 else set()
        detectable = restore.state.wrong_nodes - self._common_wrong_nodes.get(job, frozenset()) - undetectable
        replicated = self.world.jobs[job].replicated
        audited = restore.spec.spec.keeps_audited_version  # left to the checker of audited restores
        if after_corruption and detectable and replicated and not audited:
            raise Violation(
                self.name, f"{job} generation {restore.spec.number} starts from wrong results of {sorted(detectable)}"
            )
        self._common_wrong_nodes[job] = restore.state.wrong_nodes

    def _on_step(self, finished: StepFinished) -> None:
        version = Version(finished.generation, finished.step)
        self._finished_at.setdefault((finished.job, version), self.world.timeline.now)

    def _on_loss(self, loss: MemoryLost | FaultInjected) -> None:
        self._data_losses.note(self.world, loss)

    def _on_failed_restore(self, failure: RestoreFailed) -> None:
        self._check_loss(failure.spec, failure.sentence)

    def _check_loss(self, spec: GenerationSpec, sentence: str) -> None:
        """Check that as many machines as there are copies have lost the version or are unreachable."""
        floor = spec.restore.floor
        if floor is None:
            return
        holders = self._holders.get((spec.job, floor.generation), set())
        reader = spec.roster[0].node
        since = self._finished_at.get((spec.job, floor), 0.0)
        lost_nodes = self._data_losses.since(since)
        known_holders = {holder.node for holder in spec.holders}
        for node in holders:
            machine = self.world.machines[node]
            is_running = machine.has_power and not machine.is_frozen
            if node not in known_holders or not is_running or not self.world.network.connected(reader, node):
                lost_nodes.add(node)
        if len(lost_nodes & holders) < min(spec.spec.replicas, len(holders)):
            raise Violation(
                self.name,
                f"{spec.job} generation {spec.number}: {floor} was committed on {sorted(holders)}, of which only "
                f"{sorted(lost_nodes & holders)} lost it, and it was not restored: {sentence}",
            )
