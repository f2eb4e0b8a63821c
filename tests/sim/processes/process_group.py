"""Simulate the process group of a generation.

All members finish a step, or none does. Only some members notice a lost peer, as in gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.errors import ConfigurationError, NotRestorable, Unavailable
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.slots.version_choice import VersionChoice, choose_version
from tests.sim.cluster.observations import CheckpointMissing, RestoreFailed, StateRestored
from tests.sim.cluster.training_state import TrainingState, initial_state, manifest_of, samples_of_all
from tests.sim.processes.parity_rebuild import rebuild_shares
from tests.sim.processes.peer_audits import PeerAudits
from tests.sim.processes.vault_memory import Slot

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine
    from tests.sim.cluster.world import World
    from tests.sim.processes.rank import RankProcess

RETRY_S = 0.2
"""Seconds until a group that cannot communicate or restore tries again."""
JOIN_TIMEOUT_S = 15.0
"""Seconds after which a member leaves a group that is not complete."""
MAX_REMEMBERED_STATES = 64
"""States of a step that are remembered, so that members with equal states share one."""


class ProcessGroup:
    """A simulated process group.

    Attributes:
        members: The processes that have joined and not left, by rank.
        is_formed: Whether all members have joined and restored a state.
        is_broken: Whether a member has left. Then no further step is finished.
    """

    def __init__(self, world: World, spec: GenerationSpec) -> None:
        self.world = world
        self.spec = spec
        self.job = world.jobs[spec.job]
        self.members: dict[int, RankProcess] = {}
        self.is_broken = False
        self.is_formed = False
        self._step_began_at = 0.0
        self._finished_pids: set[int] = set()
        self._wrong_nodes: frozenset[str] = frozenset()
        self._next_states: dict[tuple[str, str], TrainingState] = {}
        self._nodes = sorted({member.node for member in spec.roster})
        self._audits = PeerAudits(self) if spec.spec.keeps_audited_version else None

    def join(self, process: RankProcess, rank: int) -> None:
        """Add a member. The last one forms the group."""
        self.members[rank] = process
        timeline = self.world.timeline
        timeline.after(JOIN_TIMEOUT_S, lambda: process.call_when_running(lambda: self._check_join_timeout(process)))
        if self.is_broken:
            timeline.after(0.05, lambda: process.call_when_running(lambda: self._fail(process, "a member has left")))
        elif len(self.members) == self.spec.world_size:
            timeline.after(0.03 + 0.05 * self.world.rng.random(), self._form)

    def _check_join_timeout(self, process: RankProcess) -> None:
        if not self.is_formed:
            process.handle_collective_failure(self, "not all members have joined")

    def _fail(self, process: RankProcess, detail: str) -> None:
        process.handle_collective_failure(self, detail)

    def _is_complete(self) -> bool:
        return not self.is_broken and len(self.members) == self.spec.world_size

    def _can_communicate(self) -> bool:
        """Return whether all members run and reach one another."""
        network = self.world.network
        if not all(member.is_responsive for member in self.members.values()):
            return False
        return network.has_no_cuts() or all(
            network.connected(first, second) for i, first in enumerate(self._nodes) for second in self._nodes[i + 1 :]
        )

    def _form(self) -> None:
        if not self._is_complete() or self.is_formed:
            return
        if not self._can_communicate():
            self.world.timeline.after(RETRY_S, self._form)
            return
        try:
            start = self._restore()
        except Unavailable:
            self.world.timeline.after(RETRY_S, self._form)
            return
        except NotRestorable as error:
            self.world.observe(RestoreFailed(self.spec, str(error)))
            for member in list(self.members.values()):
                member.handle_restore_failure(self, str(error))
            return
        self.is_formed = True
        self.world.observe(start)
        for member in list(self.members.values()):
            member.start_training(start.state, start.version)
        self._begin_step()

    def _restore(self) -> StateRestored:
        """Restore the version that the product's code chooses from the vaults that the first rank reaches.

        Raises:
            NotRestorable: No version may be restored.
            Unavailable: The storage does not answer.
        """
        found = self._slots()
        try:
            choice = self._choose(found)
        except NotRestorable:
            if self.spec.restore.protection is None:
                raise
            choice = None
        protection = self.spec.restore.protection
        if (choice is None or choice.version is None) and protection is not None:
            found_ranks = {info.rank for info in found if info.version == protection.version}
            found |= dict(rebuild_shares(self.spec.job, protection, found_ranks, self._vault_of))
            choice = self._choose(found)
        assert choice is not None
        if choice.version is not None:
            return StateRestored(self.spec, choice.version, *_join_shares([found[info].state for info in choice.slots]))
        return self._from_storage()

    def _from_storage(self) -> StateRestored:
        """Restore the checkpoint that the rule names, or the initial state if it names none."""
        url = self.spec.restore.storage_url
        if not url:
            return StateRestored(self.spec, None, initial_state(), False)
        try:
            states = self.world.storage.load(url)
        except ConfigurationError as error:
            raise NotRestorable(str(error)) from error
        if states is None:
            self.world.observe(CheckpointMissing(self.spec))
            raise NotRestorable(f"there is no checkpoint at {url}")
        return StateRestored(self.spec, None, *_join_shares(states), storage=url)

    def _choose(self, found: dict[SlotInfo, Slot]) -> VersionChoice:
        layouts = {"/".join(map(str, slot.layout)): slot.layout for slot in found.values()}
        return choose_version(self.spec.restore, list(found), lambda digest: manifest_of(*layouts[digest]))

    def _vault_of(self, node: str) -> Machine | None:
        """Return the node's machine if its vault is a known holder and answers the first rank."""
        machine = self.world.machines[node]
        is_holder = any(holder.node == node for holder in self.spec.holders)
        reader = self.spec.roster[0].node
        answers = machine.has_power and not machine.is_frozen and self.world.network.connected(reader, node)
        return machine if is_holder and answers else None

    def _slots(self) -> dict[SlotInfo, Slot]:
        found: dict[SlotInfo, Slot] = {}
        for holder in self.spec.holders:
            machine = self._vault_of(holder.node)
            for segment in machine.vault_memory.segments_of(self.spec.job) if machine is not None else ():
                for index, slot in enumerate(segment.slots):
                    if slot is not None and slot.sealed and not slot.corrupt:
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

    def _begin_step(self) -> None:
        self._finished_pids.clear()
        self._step_began_at = self.world.timeline.now
        slowest = max(member.machine.slowness for member in self.members.values())
        duration_s = self.job.step_s * slowest * (0.95 + 0.1 * self.world.rng.random())
        self.world.timeline.after(duration_s, self._reduce)

    def _reduce(self) -> None:
        if not self._is_complete():
            return
        if not self._can_communicate():
            self.world.timeline.after(RETRY_S, self._reduce)
            return
        state = next(iter(self.members.values())).state
        assert state is not None
        step = state.step + 1
        step_s = self.world.timeline.now - self._step_began_at
        if self._audits is not None:
            self._audits.audit(step)
            self._wrong_nodes = self._audits.wrong_nodes()
        for member in self.members.values():
            late_s = 0.002 * self.world.rng.random()
            self.world.timeline.after(
                late_s,
                lambda m=member: m.call_when_running(lambda: m.finish_step(self, step, step_s)),  # type: ignore[misc]
            )

    def next_state(self, process: RankProcess) -> TrainingState:
        """Return a member's state after this step. Members with equal states that compute correctly stay equal."""
        state = process.state
        assert state is not None
        own = frozenset({process.machine.name}) if process.machine.computes_wrongly else frozenset()
        wrong = own if self._audits is None else self._wrong_nodes
        key = (state.digest, ",".join(sorted(wrong)))
        if key not in self._next_states:
            if len(self._next_states) > MAX_REMEMBERED_STATES:
                self._next_states.clear()
            samples = samples_of_all(state.step + 1, self.spec.world_size)
            self._next_states[key] = TrainingState(state, state.step + 1, samples, state.wrong_nodes | wrong)
        return self._next_states[key]

    def note_finished_step(self, process: RankProcess, step: int) -> None:
        """Note that a member has finished the step. After the last member, the next step begins."""
        if not self._is_complete():
            return
        self._finished_pids.add(process.pid)
        is_last = self.job.last_step is not None and step >= self.job.last_step
        if len(self._finished_pids) == self.spec.world_size and not is_last:
            self._begin_step()

    def remove(self, process: RankProcess) -> None:
        """Remove a member that left or died. Its closed connections fail the operations of waiting peers."""
        rank = next((rank for rank, member in self.members.items() if member is process), None)
        if rank is None:
            return
        del self.members[rank]
        self.is_broken = True
        rng, world = self.world.rng, self.spec.world_size
        for other, member in list(self.members.items()):
            is_neighbour = (other - rank) % world in (1, world - 1)
            if is_neighbour:
                delay_s = 0.015 + 0.065 * rng.random()
            elif rng.random() < 0.3:
                delay_s = 0.1 + rng.random()
            else:
                continue  # gloo leaves this peer waiting until its rank is interrupted
            self.world.timeline.after(
                delay_s,
                lambda m=member: m.call_when_running(lambda: self._fail(m, "connection reset by peer")),  # type: ignore[misc]
            )


def _join_shares(states: list[TrainingState]) -> tuple[TrainingState, bool]:
    """Join the shares of several ranks, and return whether they differ.

    A wrong result in one share is part of every rank's state from now on.
    """
    first = states[0]
    shares_differ = any((s.step, s.samples) != (first.step, first.samples) for s in states)
    wrong_nodes = frozenset().union(*(s.wrong_nodes for s in states))
    if wrong_nodes == first.wrong_nodes:
        return first, shares_differ
    return TrainingState(first.parent, first.step, first.samples, wrong_nodes), shares_differ
