"""The process group of one generation: all members or nobody, step by step; some notice that one is gone, some wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep_trainer.restore.version_choice import VersionChoice, choose_version

from everstep.errors import ConfigurationError, NotRestorable, Unavailable
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.audits import Audits
from tests.sim.lost_shards import made_again
from tests.sim.training_state import TrainingState, manifest_of, scratch, seen_by_all
from tests.sim.vault_memory import Slot

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.rank_process import RankProcess
    from tests.sim.world import World

LOOK_AGAIN_S = 0.2
JOIN_TIMEOUT_S = 15.0


class Collective:
    """Made when the first member joins."""

    def __init__(self, world: World, spec: GenerationSpec) -> None:
        self.world = world
        self.spec = spec
        self.job = world.jobs[spec.job]
        self.members: dict[int, RankProcess] = {}
        self.broken = False
        self.inside = False
        self._step_began = 0.0
        self._done: set[int] = set()
        self._wrong: frozenset[str] = frozenset()
        self._next: dict[tuple[str, str], TrainingState] = {}
        self._nodes = sorted({member.node for member in spec.roster})
        self._audits = Audits(self) if spec.spec.keeps_audited_version else None

    # --- in ----------------------------------------------------------------------------------------------------------

    def join(self, process: RankProcess, rank: int) -> None:
        self.members[rank] = process
        timeline = self.world.timeline
        timeline.after(JOIN_TIMEOUT_S, lambda: process.do(lambda: self._join_is_late(process)))
        if self.broken:
            timeline.after(0.05, lambda: process.do(lambda: process.collective_failed(self, "a member has left")))
        elif len(self.members) == self.spec.world_size:
            timeline.after(0.03 + 0.05 * self.world.rng.random(), self._form)

    def _join_is_late(self, process: RankProcess) -> None:
        if not self.inside:
            process.collective_failed(self, "not everybody has joined")

    def _whole(self) -> bool:
        return not self.broken and len(self.members) == self.spec.world_size

    def _able(self) -> bool:
        """All members run and reach one another."""
        wires = self.world.wires
        if not all(member.responsive for member in self.members.values()):
            return False
        return wires.quiet() or all(
            wires.connected(one, other) for i, one in enumerate(self._nodes) for other in self._nodes[i + 1 :]
        )

    def _form(self) -> None:
        if not self._whole() or self.inside:
            return
        if not self._able():
            self.world.timeline.after(LOOK_AGAIN_S, self._form)
            return
        try:
            start = self._restore()
        except Unavailable:
            self.world.timeline.after(LOOK_AGAIN_S, self._form)
            return
        except NotRestorable as error:
            self.world.see(facts.Unrestorable(self.spec, str(error)))
            for member in list(self.members.values()):
                member.cannot_restore(self, str(error))
            return
        self.inside = True
        self.world.see(start)
        for member in list(self.members.values()):
            member.formed(start.state, start.version)
        self._begin_step()

    def _restore(self) -> facts.Restored:
        """What the vaults within reach hold, and the real choice among it. Raises NotRestorable, and Unavailable for
        storage that does not answer."""
        found = self._slots()
        try:
            choice = self._choose(found)
        except NotRestorable:
            if self.spec.restore.protection is None:
                raise
            choice = None
        protection = self.spec.restore.protection
        if (choice is None or choice.version is None) and protection is not None:
            there = {info.rank for info in found if info.version == protection.version}
            found |= dict(made_again(self.spec.job, protection, there, self._vault_of))
            choice = self._choose(found)
        assert choice is not None
        if choice.version is not None:
            return facts.Restored(self.spec, choice.version, *_joined([found[info].state for info in choice.slots]))
        return self._from_storage()

    def _from_storage(self) -> facts.Restored:
        """The checkpoint that the rule names, or the very beginning where it names none."""
        url = self.spec.restore.storage_url
        if not url:
            return facts.Restored(self.spec, None, scratch(), False)
        try:
            states = self.world.storage.load(url)
        except ConfigurationError as error:
            raise NotRestorable(str(error)) from error
        if states is None:
            self.world.see(facts.StorageBare(self.spec))
            raise NotRestorable(f"there is no checkpoint at {url}")
        return facts.Restored(self.spec, None, *_joined(states), storage=url)

    def _choose(self, found: dict[SlotInfo, Slot]) -> VersionChoice:
        layouts = {"/".join(map(str, slot.layout)): slot.layout for slot in found.values()}
        return choose_version(self.spec.restore, list(found), lambda digest: manifest_of(*layouts[digest]))

    def _vault_of(self, node: str) -> Machine | None:
        """Its machine, where its vault is known and answers."""
        machine = self.world.machines[node]
        known = any(holder.node == node for holder in self.spec.holders)
        chair = self.spec.roster[0].node
        answers = machine.power and not machine.frozen and self.world.wires.connected(chair, node)
        return machine if known and answers else None

    def _slots(self) -> dict[SlotInfo, Slot]:
        found: dict[SlotInfo, Slot] = {}
        for holder in self.spec.holders:
            machine = self._vault_of(holder.node)
            for segment in machine.vault.of_job(self.spec.job) if machine is not None else ():
                for index, slot in enumerate(segment.slots):
                    if slot is not None and slot.sealed and not slot.rotten:
                        info = SlotInfo(
                            node=holder.node,
                            rank=slot.layout[0],
                            version=slot.version,
                            path=f"{segment.node}-{segment.rank}",
                            slot=index,
                            replica=segment.replica,
                            manifest_digest="/".join(map(str, slot.layout)),
                        )
                        found[info] = slot
        return found

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._done.clear()
        self._step_began = self.world.timeline.now
        slowest = max(member.machine.slowness for member in self.members.values())
        duration_s = self.job.step_s * slowest * (0.95 + 0.1 * self.world.rng.random())
        self.world.timeline.after(duration_s, self._reduce)

    def _reduce(self) -> None:
        if not self._whole():
            return
        if not self._able():
            self.world.timeline.after(LOOK_AGAIN_S, self._reduce)
            return
        some = next(iter(self.members.values()))
        assert some.state is not None
        step = some.state.step + 1
        step_s = self.world.timeline.now - self._step_began
        if self._audits is not None:
            self._audits.step(step)
            self._wrong = self._audits.wrong()
        for member in self.members.values():
            late_s = 0.002 * self.world.rng.random()
            self.world.timeline.after(
                late_s,
                lambda m=member: m.do(lambda: m.finish_step(self, step, step_s)),  # type: ignore[misc]
            )

    def next_state(self, process: RankProcess) -> TrainingState:
        """The state after this step of a member: equal for all who were equal before and compute rightly."""
        before = process.state
        assert before is not None
        own = frozenset({process.machine.name}) if process.machine.lying else frozenset()
        wrong = own if self._audits is None else self._wrong
        key = (before.digest, ",".join(sorted(wrong)))
        if key not in self._next:
            if len(self._next) > 64:
                self._next.clear()
            seen = seen_by_all(before.step + 1, self.spec.world_size)
            self._next[key] = TrainingState(before, before.step + 1, seen, before.liars | wrong)
        return self._next[key]

    def finished(self, process: RankProcess, step: int) -> None:
        """A member has finished its step; with the last one the next begins."""
        if not self._whole():
            return
        self._done.add(process.life)
        if len(self._done) == self.spec.world_size and (self.job.until is None or step < self.job.until):
            self._begin_step()

    # --- out ---------------------------------------------------------------------------------------------------------

    def left(self, process: RankProcess) -> None:
        """A member closed its connections in order: who waits for it is told by a failed operation."""
        self._without(process)

    def lost(self, process: RankProcess) -> None:
        """A member's process is gone."""
        self._without(process)

    def _without(self, process: RankProcess) -> None:
        rank = next((rank for rank, member in self.members.items() if member is process), None)
        if rank is None:
            return
        del self.members[rank]
        self.broken = True
        rng, world = self.world.rng, self.spec.world_size
        for other, member in list(self.members.items()):
            neighbour = (other - rank) % world in (1, world - 1)
            if neighbour:
                delay_s = 0.015 + 0.065 * rng.random()
            elif rng.random() < 0.3:
                delay_s = 0.1 + rng.random()
            else:
                continue  # gloo leaves it waiting, until somebody tells it to leave
            self.world.timeline.after(
                delay_s,
                lambda m=member: m.do(lambda: m.collective_failed(self, "connection reset by peer")),  # type: ignore[misc]
            )


def _joined(states: list[TrainingState]) -> tuple[TrainingState, bool]:
    """The shares of several ranks together; what one of them got wrong is wrong for all from now on."""
    first = states[0]
    torn = any((s.step, s.seen) != (first.step, first.seen) for s in states)
    liars = frozenset().union(*(s.liars for s in states))
    if liars == first.liars:
        return first, torn
    return TrainingState(first.parent, first.step, first.seen, liars), torn
