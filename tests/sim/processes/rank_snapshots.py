"""Simulate the snapshots of a rank: the real retention of versions over simulated slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.training import GenerationSpec, Member, VersionSealed
from everstep_trainer.snapshot.retention import VersionRetention
from tests.sim.cluster.training_state import TrainingState
from tests.sim.processes.vault_memory import Slot

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess


class RankSnapshots:
    """The snapshots of one process, in one generation after the other."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._machine, self._world, self._job = process.machine, process.world, process.job
        self._copying: Slot | None = None
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self._retention: VersionRetention | None = None

    def enter(self, spec: GenerationSpec, member: Member, restored: Version | None) -> None:
        """Begin a generation with the version ``restored``."""
        self._spec, self._member = spec, member
        self._retention = VersionRetention(spec.number, spec.restore, restored)

    def update_notice(self, notice: VersionNotice) -> None:
        """Update the committed version, the next candidate and the pinned versions from the controller's notice."""
        if self._retention is not None and self._spec is not None and notice.generation == self._spec.number:
            self._retention.update(notice.committed, notice.candidate, notice.pinned)

    def snapshot(self, step: int, state: TrainingState) -> None:
        """Copy the state into a slot while the next step runs."""
        spec, member, retention = self._spec, self._member, self._retention
        assert spec is not None
        assert member is not None
        assert retention is not None
        layout = (member.rank, spec.world_size, spec.spec.nproc_per_node, spec.spec.replicas, self._job.replicated)
        slot = Slot(Version(spec.number, step), layout, state)
        segment = self._machine.vault_memory.segment(
            self._job.name,
            self._machine.name,
            self._process.local_rank,
            replica=False,
            slots=SLOTS_PER_RANK + spec.spec.pinned_slots,
        )
        try:
            segment.slots[retention.slot_to_fill(segment.headers(), _every_step)] = slot
        except OutOfSlotMemory:
            return
        self._copying = slot
        copy_s = self._job.step_s * (0.05 + 0.4 * self._world.rng.random())
        self._world.timeline.after(copy_s, lambda: self._process.call_when_running(lambda: self._seal(slot)))

    def finish_copy(self) -> None:
        """Complete at once a copy that has begun."""
        if self._copying is not None:
            self._seal(self._copying)

    def _seal(self, slot: Slot) -> None:
        spec, member, retention = self._spec, self._member, self._retention
        if self._copying is not slot or spec is None or member is None or retention is None:
            return
        self._copying = None
        slot.sealed = True
        is_candidate = retention.is_candidate(slot.version.step)
        if is_candidate:
            retention.keep_candidate(slot.version)
        interval = spec.spec.digest_interval
        is_digest_due = interval > 0 and (is_candidate or slot.version.step % interval == 0)
        digests = {"replicated": slot.state.digest} if is_digest_due and self._job.replicated else {}
        targets = () if self._job.replicated else spec.replica_nodes.get(self._machine.name, ())
        if not targets:
            self._report(slot, spec, member, is_candidate, digests, is_durable=True, holders=())
            return
        own = self._machine.vault_memory.segment(
            self._job.name, self._machine.name, self._process.local_rank, replica=False
        )
        needed = retention.needed_in_copies(own.headers(), _every_step)
        self._world.replicate(self, slot, spec, member, is_candidate, targets, needed)

    def handle_copies(
        self, slot: Slot, spec: GenerationSpec, member: Member, is_candidate: bool, holders: tuple[str, ...]
    ) -> None:
        """Report the version with the nodes that hold its copies, now that all have answered."""
        required = min(spec.spec.replicas - 1, len(spec.replica_nodes.get(self._machine.name, ())))
        is_durable = len(holders) >= required
        self._process.call_when_running(
            lambda: self._report(slot, spec, member, is_candidate, {}, is_durable=is_durable, holders=holders)
        )

    def _report(
        self,
        slot: Slot,
        spec: GenerationSpec,
        member: Member,
        is_candidate: bool,
        digests: dict[str, str],
        *,
        is_durable: bool,
        holders: tuple[str, ...],
    ) -> None:
        if is_candidate or digests:
            self._process.send_to_agent(
                VersionSealed(
                    job=spec.job,
                    at=self._machine.clock.wall(),
                    generation=spec.number,
                    rank=member.rank,
                    version=slot.version,
                    bytes=100,
                    durable=is_durable,
                    commit_candidate=is_candidate,
                    full_copies=holders,
                    digests=digests,
                )
            )


def _every_step(_step: int) -> bool:
    """Return True, since simulated ranks store every step."""
    return True
