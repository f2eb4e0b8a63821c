"""Decide which versions a rank keeps in its slots and which steps it stores, by the controller's last notice.

Used from the copier thread; ``update`` is called from another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader, SlotState
from everstep.layout.slots import SLOTS_PER_RANK, slot_to_fill
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.snapshot.slot_negotiation import CANDIDATE_ONLY_SLOTS


class VersionRetention:
    """Retention of one rank in one generation, which could start from ``rule``'s versions and did from ``restored``, or
    from a checkpoint on storage after ``stored_step``."""

    def __init__(self, generation: int, rule: RestoreRule, restored: Version | None, stored_step: int = 0) -> None:
        self._generation = generation
        self._slots = SLOTS_PER_RANK
        self._restored = restored
        self._lock = threading.Lock()
        self._committed = rule.floor
        self._pinned = frozenset(rule.pinned)
        self._candidate = (stored_step if restored is None else restored.step) + 1
        self._kept: Version | None = None

    def update(self, committed: Version | None, candidate: int | None, pinned: Iterable[Version]) -> bool:
        """Apply the controller's notice; return whether a newer version is committed than was known. The previous
        candidate is kept until then, versions in ``pinned`` while another slot is free. A candidate that is already
        sealed comes too late."""
        with self._lock:
            self._pinned = frozenset(pinned)
            newer = committed is not None and (self._committed is None or committed > self._committed)
            if newer:
                self._committed = committed
            if candidate is not None:
                self._candidate = candidate
            return newer

    def is_candidate(self, step: int) -> bool:
        """Return whether the version of this step may be committed next, as far as is known now."""
        with self._lock:
            return step == self._candidate

    def set_slot_count(self, slots: int) -> None:
        """Set the slots besides those for pinned versions, on all ranks at once; fewer hold ``versions_to_carry``."""
        self._slots = slots

    def versions_to_carry(self) -> list[Version]:
        """Return the versions to move into fewer slots, the most important first: the committed one, the candidate
        sealed last (before the first one, the version that the generation started from), the pinned ones."""
        with self._lock:
            last = self._kept or self._restored
            first = [version for version in (self._committed, last) if version is not None]
            return list(dict.fromkeys([*first, *sorted(self._pinned)]))

    def keep_candidate(self, version: Version) -> None:
        """Record that a candidate was sealed."""
        self._kept = version

    def slot_to_fill(self, headers: Sequence[SlotHeader | None], is_regular: Callable[[int], bool]) -> int:
        """Return the slot to write: the oldest whose version is not ``needed``. Raises OutOfSlotMemory."""
        needed = self.needed(_sealed(headers), is_regular)
        try:
            return slot_to_fill(list(headers), needed | self._pins(headers))
        except OutOfSlotMemory:  # training takes precedence over readers of pinned versions
            return slot_to_fill(list(headers), needed)

    def slot_for_rescue(self, headers: Sequence[SlotHeader | None], is_regular: Callable[[int], bool]) -> int:
        """Return the slot for a version that is stored late, in this rank's segment or in that of a dead rank, whose
        copied slots its vault will seal. Nothing is given up that may be committed or was restored, since the version
        may still turn out to be incomplete. Raises OutOfSlotMemory."""
        complete = [h is not None and h.state in (SlotState.SEALED, SlotState.COPIED) for h in headers]
        if not all(complete):
            return complete.index(False)
        found = [header for header in headers if header is not None]
        keep = self.needed([h.version for h in found], is_regular) | set(self.versions_to_carry())
        return slot_to_fill([msgspec.structs.replace(h, state=SlotState.SEALED) for h in found], keep)

    def needed_in_copies(self, headers: list[SlotHeader | None], is_regular: Callable[[int], bool]) -> set[Version]:
        """Return the versions that must not be overwritten where this rank's slots are copied to."""
        return self.needed(_sealed(headers), is_regular) | self._pins(headers)

    def _pins(self, headers: Sequence[SlotHeader | None]) -> frozenset[Version]:
        """Return the pinned versions, if there are slots for them."""
        with self._lock:
            return self._pinned if len(headers) > self._slots else frozenset()

    def needed(self, sealed: Iterable[Version], is_regular: Callable[[int], bool]) -> set[Version]:
        """Return which sealed versions must stay: the committed one, the candidate sealed last, and the two newest of
        regular steps, which all ranks store whatever notices they have received. When the third one after a version
        begins, every rank has sealed the next one. Versions of other generations count only if restored. With
        CANDIDATE_ONLY_SLOTS the next candidate begins when it is announced: the last one is committed by then, or
        never."""
        with self._lock:
            committed = {self._committed} if self._committed is not None else set()
        if self._slots == CANDIDATE_ONLY_SLOTS:
            return committed
        own = {v for v in sealed if v.generation == self._generation and is_regular(v.step)}
        own |= {v for v in sealed if v == self._restored}
        return {*sorted(own)[-2:], *committed, *({self._kept} if self._kept is not None else ())}


def _sealed(headers: Sequence[SlotHeader | None]) -> list[Version]:
    return [header.version for header in headers if header is not None and header.state is SlotState.SEALED]
