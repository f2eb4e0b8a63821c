"""Check that ranks' slots always hold the whole committed version, for a controller that commits by decision 0008.

Ranks step together, at most one step apart. They fill and seal slots at different times, and receive notices late but
in order. All ranks may be lost between any two events. The next generation then begins with the committed version and
the newest version that all ranks have. After a new plan the number of slots may be smaller, or the larger one again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView
from everstep.wire.v1.training import RestoreRule
from everstep_agent.vault.memory.segments import slots_to_carry
from everstep_trainer.snapshot.retention import VersionRetention
from everstep_trainer.snapshot.slot_negotiation import CANDIDATE_ONLY_SLOTS
from tests.support.plugins.example_counts import examples

RANKS = 3
rank_number = st.integers(0, RANKS - 1)


class RankSlots:
    """One rank: its slots, and the slot that it fills and has not sealed yet."""

    def __init__(self, slots: int) -> None:
        self.headers: list[SlotHeader | None] = [None] * slots
        self.retention: VersionRetention
        self.finished = 0
        self.filling: int | None = None
        self.kept = False
        self.notices: deque[tuple[Version | None, int]] = deque()

    def sealed(self) -> set[Version]:
        return {h.version for h in self.headers if h is not None and h.state is SlotState.SEALED}

    def replace(self, slots: int, keep: list[Version]) -> None:
        """Change the number of slots as the vault does."""
        old = SimpleNamespace(slots=len(self.headers), sealed_slots=self._sealed_slots)
        made: list[SlotHeader | None] = [None] * slots
        for _, place, header in slots_to_carry(cast(SegmentView, old), slots, keep):
            made[place] = header
        self.headers = made

    def _sealed_slots(self) -> Iterator[tuple[int, SlotHeader]]:
        for slot, header in enumerate(self.headers):
            if header is not None and header.state is SlotState.SEALED:
                yield slot, header


class Slots(RuleBasedStateMachine):
    """``every``: steps between snapshots that are no candidates. ``changing``: whether the number of slots changes."""

    slots, every, changing = 5, 1, False

    @initialize()
    def begin(self) -> None:
        self.now = self.slots
        self.ranks = [RankSlots(self.slots) for _ in range(RANKS)]
        self.number = 0
        self.committed: Version | None = None
        self.form(None)

    def form(self, restored: Version | None) -> None:
        self.number += 1
        self.candidate = 1 if restored is None else restored.step + 1
        self.reported: set[int] = set()
        self.first = self.since = restored.step if restored is not None else 0
        for rank in self.ranks:
            rank.retention = VersionRetention(self.number, RestoreRule(floor=self.committed), restored)
            rank.retention.set_slot_count(self.now)
            rank.finished, rank.filling = self.first, None
            rank.notices.clear()

    def is_regular(self, step: int) -> bool:
        return step % self.every == 0

    @rule(number=rank_number)
    def step(self, number: int) -> None:
        """Let a rank finish a step that all take part in, seal the earlier slot, and begin to fill another one."""
        rank = self.ranks[number]
        if rank.finished > min(other.finished for other in self.ranks):
            return
        self.seal(number)
        rank.finished += 1
        announced = rank.retention.is_candidate(rank.finished)
        if not announced and (self.now == CANDIDATE_ONLY_SLOTS or not self.is_regular(rank.finished)):
            return
        slot = rank.retention.slot_to_fill(rank.headers, self.is_regular)
        version = Version(self.number, rank.finished)
        rank.headers[slot] = SlotHeader(SlotState.FILLING, number, version, 0, 0)
        rank.filling, rank.kept = slot, announced

    @rule()
    def plan_anew(self) -> None:
        """Change the number of slots after a step that all ranks have finished, as new layouts may require."""
        if not self.changing or len({rank.finished for rank in self.ranks}) > 1:
            return
        self.now = CANDIDATE_ONLY_SLOTS if self.now == SLOTS_PER_RANK else SLOTS_PER_RANK
        self.since = self.ranks[0].finished
        for number, rank in enumerate(self.ranks):
            self.seal(number)
            rank.replace(self.now, rank.retention.versions_to_carry())
            rank.retention.set_slot_count(self.now)

    @rule(order=st.permutations(range(RANKS)), deaf=st.none() | rank_number)
    def step_together(self, order: list[int], deaf: int | None) -> None:
        """Step all ranks that are behind, then all ranks. All but the ``deaf`` one have read their notices."""
        for rank in self.ranks:
            while rank.notices and rank is not (None if deaf is None else self.ranks[deaf]):
                rank.retention.update(*rank.notices.popleft(), ())
        first = min(rank.finished for rank in self.ranks)
        for number in [n for n in order if self.ranks[n].finished == first] + order:
            self.step(number)

    @rule(number=rank_number)
    def seal(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.filling is None:
            return
        header = rank.headers[rank.filling]
        assert header is not None
        rank.headers[rank.filling] = SlotHeader(SlotState.SEALED, number, header.version, 0, 0)
        rank.filling = None
        if rank.kept:
            rank.retention.keep_candidate(header.version)
            self.report_kept(number, header.version.step)

    def report_kept(self, number: int, step: int) -> None:
        if step != self.candidate:
            return
        self.reported.add(number)
        if len(self.reported) == RANKS:
            self.committed = Version(self.number, step)
            self.announce(1)

    @rule(ahead=st.integers(1, 3))
    def announce(self, ahead: int) -> None:
        """Announce a candidate that no rank has finished. An earlier one that is not committed is given up."""
        self.candidate = max(rank.finished for rank in self.ranks) + ahead
        self.reported = set()
        for rank in self.ranks:
            rank.notices.append((self.committed, self.candidate))

    @rule(number=rank_number)
    def hear(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.notices:
            rank.retention.update(*rank.notices.popleft(), ())

    @rule()
    def lose_everything_but_the_slots(self) -> None:
        whole = self.whole()
        if whole:
            self.form(max(whole))
        elif self.committed is None:
            self.form(None)

    def whole(self) -> set[Version]:
        """Return the versions that may be restored: all ranks have them, and none is older than the committed one."""
        common = set.intersection(*(rank.sealed() for rank in self.ranks))
        return {v for v in common if self.committed is None or v >= self.committed}

    @invariant()
    def committed_version_is_whole(self) -> None:
        if self.committed is not None:
            assert self.committed in self.whole()

    @invariant()
    def with_all_slots_no_finished_step_is_far(self) -> None:
        """Check that the last stored step but one is whole, since some ranks may still fill the last one."""
        regular = [
            step
            for step in range(self.since + 1, min(rank.finished for rank in self.ranks) + 1)
            if self.is_regular(step)
        ]
        if self.now == SLOTS_PER_RANK and len(regular) > 1:
            assert max(self.whole()) >= Version(self.number, regular[-2])


@pytest.mark.promise("committed-stays")
@pytest.mark.parametrize(("slots", "every", "changing"), [(5, 1, False), (5, 3, False), (2, 1, False), (5, 1, True)])
def test_slot_model_keeps_committed_versions_complete(slots: int, every: int, changing: bool) -> None:
    class These(Slots):
        pass

    These.slots, These.every, These.changing = slots, every, changing
    run_state_machine_as_test(
        These,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
