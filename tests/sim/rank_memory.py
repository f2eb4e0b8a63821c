"""What a rank stores of its steps, and says of it: the real retention over simulated slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep_trainer.snapshot.retention import VersionRetention

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.training import GenerationSpec, Member, VersionSealed
from tests.sim.training_state import TrainingState
from tests.sim.vault_memory import Slot

if TYPE_CHECKING:
    from tests.sim.rank_process import RankProcess


class RankMemory:
    """Of one process, in one generation after the other."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._machine, self._world, self._job = process.machine, process.world, process.job
        self._copying: Slot | None = None
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self._retention: VersionRetention | None = None

    def enter(self, spec: GenerationSpec, member: Member, restored: Version | None) -> None:
        """The process takes part in a generation, and has ``restored``."""
        self._spec, self._member = spec, member
        self._retention = VersionRetention(spec.number, spec.restore, restored)

    def note(self, notice: VersionNotice) -> None:
        """The controller's word on what is committed, what may be next, and what is to stay besides."""
        if self._retention is not None and self._spec is not None and notice.generation == self._spec.number:
            self._retention.update(notice.committed, notice.candidate, notice.pinned)

    def snapshot(self, step: int, state: TrainingState) -> None:
        """Copies the state into a slot, beside the next step."""
        spec, member, retention = self._spec, self._member, self._retention
        assert spec is not None
        assert member is not None
        assert retention is not None
        layout = (member.rank, spec.world_size, spec.spec.nproc_per_node, spec.spec.replicas, self._job.replicated)
        slot = Slot(Version(spec.number, step), layout, state)
        segment = self._machine.vault.segment(
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
        self._world.timeline.after(copy_s, lambda: self._process.do(lambda: self._seal(slot)))

    def seal_now(self) -> None:
        """A copy that was begun is completed."""
        if self._copying is not None:
            self._seal(self._copying)

    def _seal(self, slot: Slot) -> None:
        spec, member, retention = self._spec, self._member, self._retention
        if self._copying is not slot or spec is None or member is None or retention is None:
            return
        self._copying = None
        slot.sealed = True
        kept = retention.is_candidate(slot.version.step)
        if kept:
            retention.keep_candidate(slot.version)
        interval = spec.spec.digest_interval
        due = interval > 0 and (kept or slot.version.step % interval == 0)
        digests = {"replicated": slot.state.digest} if due and self._job.replicated else {}
        targets = () if self._job.replicated else spec.replica_nodes.get(self._machine.name, ())
        if not targets:
            self._report(slot, spec, member, kept, digests, safe=True, nodes=())
            return
        own = self._machine.vault.segment(self._job.name, self._machine.name, self._process.local_rank, replica=False)
        keep = retention.needed_in_copies(own.headers(), _every_step)
        self._world.replicate(self, slot, spec, member, kept, targets, keep)

    def replicated(self, slot: Slot, spec: GenerationSpec, member: Member, kept: bool, nodes: tuple[str, ...]) -> None:
        """The vault's answer: where the copies are."""
        wanted = min(spec.spec.replicas - 1, len(spec.replica_nodes.get(self._machine.name, ())))
        safe = len(nodes) >= wanted
        self._process.do(lambda: self._report(slot, spec, member, kept, {}, safe=safe, nodes=nodes))

    def _report(
        self,
        slot: Slot,
        spec: GenerationSpec,
        member: Member,
        kept: bool,
        digests: dict[str, str],
        *,
        safe: bool,
        nodes: tuple[str, ...],
    ) -> None:
        if kept or digests:
            self._process.tell(
                VersionSealed(
                    job=spec.job,
                    at=self._machine.clock.wall(),
                    generation=spec.number,
                    rank=member.rank,
                    version=slot.version,
                    bytes=100,
                    durable=safe,
                    commit_candidate=kept,
                    full_copies=nodes,
                    digests=digests,
                )
            )


def _every_step(_step: int) -> bool:
    """Ranks of the simulation store all of them."""
    return True
