"""Inject faults into the bytes of a checkpoint, at each hop of its life in real slots.

One process plays all: a copy of a model's state goes into a slot of a segment, is sealed, sent, and stored at a
replica. The checks are those of the copier, of readers and of the scrubber.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
import xxhash

from bench.sdc.injection import Fault, Injection, Site, draw
from bench.sdc.models import MODELS
from everstep.errors import DigestMismatch
from everstep.ids import Version
from everstep.layout.segment_header import segment_bytes
from everstep.layout.slots import SegmentView, chunk_digests, format_segment, slot_bytes_for
from everstep.system_clock import SystemClock
from everstep_trainer.digests.digest import combined_digest
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.copy_audit import CopyAudit
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.slots.copy import CopyResult, SlotTargets

MANIFEST, VERSION = b"manifest", Version(1, 7)


class Hop(StrEnum):
    """The place at which bytes of a checkpoint are damaged."""

    COPIED = "copied"
    """Between the copy from the device and the seal."""
    STORED = "stored"
    """In a sealed slot."""
    SENT = "sent"
    """On the way to a reader."""
    REPLICA = "replica"
    """In the sealed slot of another node."""


class Checkpoints:
    """The state of a model, and slots for it."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        self._state = torch.nn.utils.parameters_to_vector(MODELS[model](False).parameters()).detach()
        self._own, self._replica = self._segment(), self._segment()

    def record(self, hop: Hop, number: int) -> dict[str, Any]:
        """Return the record of one injection, which damages bytes once."""
        injection = replace(draw(f"checkpoint/{hop}", Site.PARAMETERS, number, 1), probability=0.0, gate=0.0)
        fault = Fault(injection, self._state.numel())
        fault.is_armed = True
        changed, caught = self._damage(hop, fault)
        return {**_about(injection, fault), "changed": changed, "caught": caught}

    def _segment(self) -> SegmentView:
        size = slot_bytes_for(len(MANIFEST), self._state.nbytes)
        buffer = memoryview(bytearray(segment_bytes(1, size)))
        format_segment(buffer, 1, size)
        return SegmentView(buffer)

    def _damage(self, hop: Hop, fault: Fault) -> tuple[bool, bool]:
        """Take a checkpoint through its life; return whether the fault changed bytes, and whether a check saw it."""
        slot = self._begin(self._own)
        slot.copy_(self._state)
        if hop is Hop.COPIED:
            fault.corrupt(slot)
            return self._is_changed(slot), not self._is_copy_right(slot)
        self._own.seal(0)
        if hop is Hop.STORED:
            fault.corrupt(slot)
            return self._is_changed(slot), not _is_intact(self._own)
        received = slot.clone()
        if hop is Hop.SENT:
            fault.corrupt(received)
            data = memoryview(received.numpy()).cast("B")  # type: ignore[arg-type]  # an array is a buffer
            return self._is_changed(received), list(chunk_digests(data)) != self._own.digests(0)[1:]
        copy = self._begin(self._replica)
        copy.copy_(received)
        self._replica.seal(0, [xxhash.xxh3_128_digest(MANIFEST), *self._own.digests(0)[1:]])
        fault.corrupt(copy)
        return self._is_changed(copy), not _is_intact(self._replica)

    def _begin(self, view: SegmentView) -> torch.Tensor:
        payload = view.begin(0, 0, VERSION, MANIFEST, self._state.nbytes)
        return torch.frombuffer(payload, dtype=torch.float32)

    def _is_changed(self, tensor: torch.Tensor) -> bool:
        return not torch.equal(tensor.view(torch.int32), self._state.view(torch.int32))

    def _is_copy_right(self, copy: torch.Tensor) -> bool:
        found: list[Mismatch] = []
        audit = CopyAudit(0, AuditOptions(interval=1), found.append, SystemClock())
        copied = CopyResult({}, before=combined_digest([self._state]))
        return (
            audit.is_right(VERSION, copied, SlotTargets([copy]), lambda: combined_digest([self._state])) and not found
        )


def _is_intact(view: SegmentView) -> bool:
    try:
        view.verify(0)
    except DigestMismatch:
        return False
    return True


def _about(injection: Injection, fault: Fault) -> dict[str, Any]:
    return {
        "corruption": str(injection.corruption),
        "shape": str(injection.shape),
        "stratum": fault.stratum,
        "activations": fault.activations,
    }
