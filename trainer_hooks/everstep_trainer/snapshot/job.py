"""One snapshot on its way from the training thread to a sealed slot: what it is of, and how far it has come."""

from __future__ import annotations

import enum
import threading
from typing import NamedTuple

import torch

from everstep.ids import Version
from everstep.layout.manifests import whole
from everstep_trainer.sdc.digest import unsigned
from everstep_trainer.snapshot.active_plan import Planned
from everstep_trainer.snapshot.copy import Sources, gpus_of
from everstep_trainer.snapshot.reports import SealedShare
from everstep_trainer.state.blob import Blob
from everstep_trainer.state.layout import Layout
from everstep_trainer.state.tensors import TrackedTensor


class Phase(enum.Enum):
    QUEUED = enum.auto()
    COPYING = enum.auto()
    COPIED = enum.auto()
    OVER = enum.auto()


class Look:
    """The tensors as they were found, and the layout that is planned for them. ``change``: what is not as it was
    before, in words. ``gpus``: where they lie; none for the host."""

    def __init__(self, tensors: list[TrackedTensor], layout: Layout, change: str = "") -> None:
        self.tensors = tensors
        self.layout = layout
        self.change = change
        self.gpus = gpus_of(tensors)
        self.sharded = any(part.box != whole(part.shape) for part in layout.parts)


class Filled(NamedTuple):
    """What was copied, and what it took, seconds. ``slot_digests``: None where the slot is still to be hashed."""

    planned: Planned
    slot: int
    digests: dict[str, torch.Tensor]
    slot_digests: list[bytes] | None
    copy_s: float

    def sealed(self, version: Version, *, kept: bool) -> SealedShare:
        """What is reported of it, once it is."""
        manifest = self.planned.manifest
        return SealedShare(
            version=version,
            slot=self.slot,
            nbytes=manifest.payload_bytes,
            exclusive=manifest.exclusive,
            kept=kept,
            digests={group: f"{unsigned(digest):016x}" for group, digest in self.digests.items()},
            alike=self.planned.share.alike,
        )


class Latch:
    """What one thread waits for and another sets, once; what is used of ``threading.Event``.

    Made, waited for and set twice in every step, where an Event of Python code takes 10 us more each time.
    """

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()
        self._unset = [True]

    def set(self) -> None:
        """Let all go on that wait, now or later. From any thread, as often as one likes."""
        try:
            self._unset.pop()  # by one thread alone
        except IndexError:
            return
        self._held.release()

    def is_set(self) -> bool:
        return not self._unset

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, for so long at most; returns whether it is."""
        if self._unset and self._held.acquire(timeout=timeout_s):
            self._held.release()
        return self.is_set()


class Job:
    """One snapshot on its way. ``kept``: its version may be committed. ``held``: ``begin`` waits until it is copied, as
    it does where it must (``hold``). ``released``: its state may change; ``overtaken``: it did before.
    """

    def __init__(
        self, version: Version, look: Look, sources: Sources, blob: Blob, overlap: bool | None, *, hold: bool = False
    ) -> None:
        self.version = version
        self.look = look
        self.sources = sources
        self.blob = blob
        self.kept = False
        self.filled: Filled | None = None
        share = sources.share  # known from the second snapshot on: of a pipeline's stage it says what the look cannot
        alone = look.sharded or (share is not None and share.alone)
        self.held = hold or (alone and not (sources.on_gpu if overlap is None else overlap))
        self.released = self.overtaken = False
        self._stood: list[int] | None = None
        self.phase = Phase.QUEUED
        self.copied = Latch()
        self.over = Latch()

    def stands(self) -> None:
        """Notes the state as it is to be copied; from the training thread."""
        self._stood = self.sources.writes.counts()

    def moved(self) -> list[str]:
        """Names of parameters that were written to since then."""
        return [] if self._stood is None else self.sources.writes.since(self._stood)
