"""Which versions a rank keeps in its slots, and of which steps it stores any: what the controller said last decides.

Used from the copier thread; ``update`` comes from another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segments import SlotHeader, SlotState
from everstep.layout.slots import SLOTS_PER_RANK, slot_to_fill
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.snapshot.slot_negotiation import CANDIDATE_ONLY_SLOTS


class VersionRetention:
    """Of one rank in one generation.

    Args:
        rule: what the generation could start from.
        restored: what it started from; its next step is the first that may be committed.
        slots: that there are, besides those for pinned versions.
    """

    def __init__(
        self, generation: int, rule: RestoreRule, restored: Version | None, slots: int = SLOTS_PER_RANK
    ) -> None:
        self._generation = generation
        self._slots = slots
        self._restored = restored
        self._lock = threading.Lock()
        self._committed = rule.floor
        self._pinned = frozenset(rule.pinned)
        self._candidate = 1 if restored is None else restored.step + 1
        self._kept: Version | None = None

    def update(self, committed: Version | None, candidate: int | None, pinned: Iterable[Version]) -> bool:
        """What the controller says: the newest committed version, and the step whose version may be committed next.
        Whether more is committed than was known.

        Both are kept, and the candidate before until then; a candidate that is sealed already comes too late.
        ``pinned`` are kept besides, as long as there is a slot to fill without them.
        """
        with self._lock:
            self._pinned = frozenset(pinned)
            newer = committed is not None and (self._committed is None or committed > self._committed)
            if newer:
                self._committed = committed
            if candidate is not None:
                self._candidate = candidate
            return newer

    def is_candidate(self, step: int) -> bool:
        """Whether the version of this step may be the next one to be committed, as far as is known now."""
        with self._lock:
            return step == self._candidate

    def set_slot_count(self, slots: int) -> None:
        """So many slots there are from now on, on all ranks from the same step on. Where they are fewer than before,
        they hold what ``versions_to_carry`` said."""
        self._slots = slots

    def versions_to_carry(self) -> list[Version]:
        """What goes along into fewer slots, as far as there are some: the committed version; the candidate sealed last,
        which may be committed without our knowing, or as long as there is none what the generation started from; and
        what is pinned."""
        with self._lock:
            last = self._kept if self._kept is not None else self._restored
            first = [version for version in (self._committed, last) if version is not None]
            return list(dict.fromkeys([*first, *sorted(self._pinned)]))

    def keep_candidate(self, version: Version) -> None:
        """A candidate was sealed."""
        self._kept = version

    def slot_to_fill(self, headers: Sequence[SlotHeader | None], is_regular: Callable[[int], bool]) -> int:
        """Where to write: over the oldest of those that are not kept. ``is_regular`` as below.

        Raises OutOfSlotMemory where every slot holds a version that is needed.
        """
        needed = self.needed(_sealed(headers), is_regular)
        try:
            return slot_to_fill(list(headers), needed | self._pins(headers))
        except OutOfSlotMemory:  # training comes before whoever reads those
            return slot_to_fill(list(headers), needed)

    def versions_needed_in_copies(
        self, headers: Sequence[SlotHeader | None], is_regular: Callable[[int], bool]
    ) -> set[Version]:
        """What must not be overwritten where this rank's slots are copied to."""
        return self.needed(_sealed(headers), is_regular) | self._pins(headers)

    def _pins(self, headers: Sequence[SlotHeader | None]) -> frozenset[Version]:
        """What is pinned, where there are slots for that."""
        with self._lock:
            return self._pinned if len(headers) > self._slots else frozenset()

    def needed(self, sealed: Iterable[Version], is_regular: Callable[[int], bool]) -> set[Version]:
        """Of these, what must not be overwritten now: the committed version, the candidate sealed last, and the two
        newest of ``is_regular`` steps, those that all ranks store whatever they have heard.

        A version is let go when the third one after it is begun. Then every rank has taken part in that step, so it had
        begun the second one after it, for which it had sealed the next one: that one all ranks have. What this
        generation did not restore is no state of its own.

        A lean rank has only the committed one to fall back on. It begins the next candidate when that is announced,
        and with it what became of the last one: it is the committed one then, or never will be.
        """
        with self._lock:
            committed = {self._committed} if self._committed is not None else set()
        if self._slots == CANDIDATE_ONLY_SLOTS:
            return committed
        own = sorted(v for v in sealed if self._is_own(v) and (is_regular(v.step) or v == self._restored))
        return {*own[-2:], *committed, *({self._kept} if self._kept is not None else ())}

    def _is_own(self, version: Version) -> bool:
        return version.generation == self._generation or version == self._restored


def _sealed(headers: Sequence[SlotHeader | None]) -> list[Version]:
    return [header.version for header in headers if header is not None and header.state is SlotState.SEALED]
