"""Check that a committed version survives the loss of any ``replicas - 1`` nodes, and that loss forecasts are true."""

from __future__ import annotations

from collections.abc import Collection

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.checkpoints.restore_points import compute_restorability
from everstep_controller.core.effects import PutGeneration
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.data_losses import DataLosses
from tests.sim.cluster.observations import (
    BatchWritten,
    FaultInjected,
    LeaderDecided,
    MemoryLost,
    StepFinished,
)
from tests.sim.processes.vault_memory import Slot


class CommittedCopies(Checker):
    """Inspect the vaults when a commit is written, and compare loss forecasts with them when a generation begins."""

    name = "committed_copies"

    def __init__(self) -> None:
        self._specs: dict[tuple[str, int], GenerationSpec] = {}
        self._finished_at: dict[tuple[str, Version], float] = {}
        self._committed: set[tuple[str, Version]] = set()
        self._data_losses = DataLosses()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            StepFinished: self._on_step,
            MemoryLost: self._on_loss,
            FaultInjected: self._on_loss,
        }

    def _on_step(self, finished: StepFinished) -> None:
        self._finished_at.setdefault(
            (finished.job, Version(finished.generation, finished.step)), self.world.timeline.now
        )

    def _on_loss(self, loss: MemoryLost | FaultInjected) -> None:
        self._data_losses.note(self.world, loss)

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, PutGeneration):
                self._specs[effect.spec.job, effect.spec.number] = effect.spec
                self._check_forecasts(decision.controller, effect.spec.job)

    def _on_write(self, write: BatchWritten) -> None:
        created = {entry.job for entry in write.batch.event_log if entry.kind == "job.created"}
        self._committed = {key for key in self._committed if key[0] not in created}
        for row in write.batch.versions.values():
            key = row.job, Version(row.generation, row.step)
            if key not in self._committed:
                self._committed.add(key)
                if not self._is_discarded(*key):
                    self._check_copies(*key)

    def _is_discarded(self, job: str, version: Version) -> bool:
        """Return whether audits discarded the version before its commit was written, after a database outage."""
        later = (spec for (name, number), spec in self._specs.items() if name == job and number > version.generation)
        return any(spec.restore.ceiling is not None and spec.restore.ceiling < version for spec in later)

    def _nodes_with_losses(self, job: str, version: Version) -> set[str]:
        """Return the nodes that lost data since the version was made."""
        return self._data_losses.since(self._finished_at[job, version])

    def _check_copies(self, job: str, version: Version) -> None:
        spec = self._specs[job, version.generation]
        lost_data, required = self._nodes_with_losses(job, version), min(spec.spec.replicas, len(spec.seats))
        holders_by_rank = self._holders(job, version)
        for rank in range(spec.world_size):
            holders = holders_by_rank.get(rank, set())
            if len(holders | lost_data) < required:
                raise Violation(
                    self.name,
                    f"{job}: {version} is committed, and the share of rank {rank} is on {sorted(holders)} alone, "
                    f"not on {required} nodes",
                )

    def _holders(self, job: str, version: Version) -> dict[int, set[str]]:
        """Return for each rank the nodes that hold its share of the version."""
        holders: dict[int, set[str]] = {}
        for name, machine in self.world.machines.items():
            for segment in machine.vault_memory.segments_of(job):
                for slot in segment.sealed():
                    if slot.version == version and not slot.corrupt:
                        for rank in _ranks_in(slot):
                            holders.setdefault(rank, set()).add(name)
        return holders

    def _check_forecasts(self, controller: str, job: str) -> None:
        """Compare the forecasts with the vaults, unless the controller cannot know of a loss of data yet."""
        state = self.world.controller(controller).state
        version = state.job_runtime[job].commits.committed_version
        if version is None or (job, version) not in self._committed or (job, version.generation) not in self._specs:
            return
        lost_data = self._nodes_with_losses(job, version)
        if any(state.nodes[node].liveness.reachable or self.world.machines[node].has_power for node in lost_data):
            return
        for forecast in compute_restorability(state, state.jobs[job]).loss_forecasts:
            if not forecast.restorable or forecast.fallback_version is not None:
                continue
            if lost := self._lost_ranks(job, version, forecast.nodes):
                raise Violation(self.name, f"{job}: {forecast.sentence}; but no other node holds ranks {lost}")

    def _lost_ranks(self, job: str, version: Version, lost_nodes: Collection[str]) -> list[int]:
        """Return the ranks whose shares of the version are lost with these nodes.

        The result is empty if a newer version is whole. Ranks would choose it, and a new leader may not know it.
        """
        newer = {
            slot.version
            for machine in self.world.machines.values()
            for segment in machine.vault_memory.segments_of(job)
            for slot in segment.sealed()
            if slot.version > version and (job, slot.version.generation) in self._specs
        }
        missing = [self._missing_ranks(job, candidate, lost_nodes) for candidate in (version, *sorted(newer))]
        return missing[0] if all(missing) else []

    def _missing_ranks(self, job: str, version: Version, lost_nodes: Collection[str]) -> list[int]:
        holders = self._holders(job, version)
        ranks = range(self._specs[job, version.generation].world_size)
        return [rank for rank in ranks if not holders.get(rank, set()) - set(lost_nodes)]


def _ranks_in(slot: Slot) -> set[int]:
    """Return the ranks whose parts a slot holds. Replicated state adds those of ``replicas - 1`` earlier nodes."""
    rank, world, per_node, replicas, replicated = slot.layout
    return {(rank - per_node * offset) % world for offset in range(replicas if replicated else 1)}
