"""What a job chooses for its snapshots in ``run.track``; the same on all ranks."""

from __future__ import annotations

import msgspec

from everstep.slots import SLOTS

LEAN_SLOTS = 2
"""The committed version and the one that may be committed next."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError, with the mend, for what is no choice.

    ``overlap``: whether the next step begins while state that no other rank holds is still copied. A rank that is
    lost meanwhile then costs the step. None: where a GPU holds it, since there a copy costs the step next to nothing.

    ``slots``: places for versions in each rank's memory, and again on the node that keeps its copies. With all of them
    (SLOTS) each step is stored, and a loss costs none that is finished; with LEAN_SLOTS only versions that are to be
    committed are, about two a second, and a loss costs the steps since the last of those. None: all of them where every
    node of the job has the memory, else LEAN_SLOTS (trainer_hooks.snapshot.provision).

    ``every``: how many steps apart snapshots are, besides those of steps that are announced to be committed. None: as
    many as it takes that training does not stand still for them for long (trainer_hooks.snapshot.pace), one as a rule.
    With LEAN_SLOTS there are none besides those.

    ``require``: whether the training script hears of it where a node has no memory for checkpoints, instead of training
    on without (trainer_hooks.snapshot.first_plan).

    ``exclude``: patterns of names of tensors that are neither stored nor restored (trainer_hooks.snapshot.exclude).
    """

    overlap: bool | None = None
    slots: int | None = None
    every: int | None = None
    exclude: tuple[str, ...] = ()
    require: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: take 1 for a snapshot of each step, or more")
        if self.every is not None and self.lean:
            raise ValueError(f"slots={LEAN_SLOTS} stores what is announced alone: leave out every={self.every}")
        if self.slots not in (None, LEAN_SLOTS, SLOTS):
            raise ValueError(
                f"slots={self.slots}: take {SLOTS}, with which every step is stored, or {LEAN_SLOTS} for what is to be "
                f"committed alone, in {LEAN_SLOTS}/{SLOTS} of the memory; or leave it out"
            )

    @property
    def lean(self) -> bool:
        """Whether the user wants it so."""
        return self.slots == LEAN_SLOTS


DEFAULT = Choices()
