"""Audit memory: parameters, optimizer state and buffers must not change between two updates.

After the update of a due step a part of them is digested, and digested again right before the next update. Successive
audits go through all of them. torch counts writes to tensors, and what it saw written to is not compared. Writes that
it does not count are recognised by their extent: they reach several ranks, many tensors of one, or a buffer, in which a
program may keep statistics on one rank. The last two may also be failing memory: the log says so, and accuses no node.

A rank states its own contradiction, so no other rank repeats anything. The comparison of GPU memory is read in the next
step: no audit waits for a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from everstep.vocabulary import AuditKind
from everstep_trainer.digests.digest import SMALL_BYTES, combined_digest, to_hex
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.witnesses import describe_difference
from everstep_trainer.state.tensors import list_names, local_part
from everstep_trainer.state.tracked_objects import TrackedObjects, named_modules

log = logging.getLogger(__name__)

PART_BYTES = {"cpu": 32 << 20}
"""Bytes of an audit by the device's type: some milliseconds on a CPU."""
GPU_PART_BYTES = 1 << 30
"""Elsewhere: about a millisecond. The interval follows from the cost, so the size only sets how even the cost is."""
SLICES_OF_A_PART = 4
"""Largest slices in a part, at least: a mismatch names one."""
BUNDLED_TENSORS = 32
"""Small tensors that share a digest."""
ASSUMED_STATE = 2
"""Tensors of state that an optimizer will make for each parameter, while it has none."""
MAX_NAMED = 3
_BY_THE_PROGRAM = (
    "%s changed between two updates, and torch counted no write: the program writes past it, so these tensors are not "
    "audited. Call run.before_update() before such writes"
)
_ON_ONE_RANK = (
    "%s changed between two updates on this rank alone, and torch counted no write: either the program writes past it "
    "here, or this rank's memory fails. These tensors are not audited any more. If the program does write here, call "
    "run.before_update() before; otherwise test the node"
)


class _WatchedTensor(NamedTuple):
    """A tensor as it is tracked, and the range of its local part that is watched; 0 to 0: all of it."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int

    def bits(self) -> torch.Tensor:
        local = local_part(self.tensor)
        return local.detach() if not self.stop else local.detach().view(-1)[self.start : self.stop]


_Unit = list[_WatchedTensor]
"""Pieces that share a digest: a large slice, or several small tensors."""


class _Watched(NamedTuple):
    unit: _Unit
    writes: list[tuple[int, int]]
    """Of each piece."""
    digest: torch.Tensor
    copies: list[torch.Tensor]
    """Of small tensors on the host, to name the bits that differ."""


class _Outcome(NamedTuple):
    step: int
    watched: list[_Watched]
    digests: list[torch.Tensor]
    differs: torch.Tensor
    """For each unit."""
    ranks: torch.Tensor
    """Number of ranks on which any differs."""


def _writes_to(piece: _WatchedTensor) -> tuple[int, int]:
    """Return torch's counts of writes; a DTensor and its local tensor are counted separately."""
    return piece.tensor._version, local_part(piece.tensor)._version


class StateAudit(Audit):
    """Watches a part of this rank's state from the update of a due step to the next update."""

    kind = AuditKind.STATE

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        self._tracked = TrackedObjects(setup.objects)
        self._part_bytes = PART_BYTES.get(setup.device.type, GPU_PART_BYTES)
        self._parts: list[list[_Unit]] = []
        self._written: set[str] = set()  # past torch's count: not audited
        self._buffers = {
            f"{name}.{key}"
            for top, root in self._tracked.modules
            for name, module in named_modules(top, root)
            for key in module._buffers
        }
        self._unstable = set(self._buffers)  # may be written to between updates: they share no digest with stable ones
        self._watched: tuple[int, list[_Watched]] | None = None
        self._outcome: _Outcome | None = None

    @property
    def rounds(self) -> int:
        nbytes = sum(local_part(tensor).nbytes for _, tensor in self._tensors())
        for _, optimizer in self._tracked.optimizers:
            if not optimizer.state:
                trained = (p for group in optimizer.param_groups for p in group["params"])
                nbytes += ASSUMED_STATE * sum(local_part(parameter).nbytes for parameter in trained)
        return -(-nbytes // self._part_bytes) + 1  # the last part is compared after its audit

    def is_needed(self, step: int) -> bool:
        return self._watched is not None or self._outcome is not None

    def before_update(self, step: int, *, due: bool) -> None:
        self._resolve()
        if self._watched is None:
            return
        (audited, watched), self._watched = self._watched, None
        with self.prepaid():
            digests = [_digest_of(piece.unit) for piece in watched]
        device = self.setup.device
        differs = torch.zeros(len(watched), dtype=torch.bool, device=device)
        for number, (watched_piece, digest) in enumerate(zip(watched, digests, strict=True)):
            writes = [_writes_to(piece) for piece in watched_piece.unit]
            if writes == watched_piece.writes:
                differs[number] = watched_piece.digest != digest
            else:
                changed = zip(watched_piece.unit, writes, watched_piece.writes, strict=True)
                self._unstable |= {piece.name for piece, now, before in changed if now != before}
        ranks = differs.any().to(torch.int64).reshape(1)
        if self.setup.world_size > 1:
            with self.waiting():
                dist.all_reduce(ranks)
        self._outcome = _Outcome(audited, watched, digests, differs, ranks)
        if device.type == "cpu":
            self._resolve()

    def after_update(self, step: int, *, due: bool) -> None:
        if not due:
            return
        if not self._parts:
            self._parts = self._plan()
        units = self._parts.pop(0) if self._parts else []
        watched = []
        for unit in units:
            is_small = sum(piece.bits().nbytes for piece in unit) <= BUNDLED_TENSORS * SMALL_BYTES
            keeps = is_small and self.setup.device.type == "cpu"
            copies = [piece.bits().clone() for piece in unit] if keeps and len(unit) > 1 else []
            writes = [_writes_to(piece) for piece in unit]
            with self.prepaying():  # the next digest, in a step that is not due
                watched.append(_Watched(unit, writes, _digest_of(unit), copies))
        self._watched = step, watched

    def close(self) -> None:
        self._parts, self._watched, self._outcome = [], None, None

    # -- parts of the state

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tracked tensors once each, by name."""
        names: dict[int, str] = {}
        for top, root in self._tracked.modules:
            for name, module in named_modules(top, root):
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None and id(tensor) not in names:
                        names[id(tensor)] = f"{name}.{key}"
                        yield names[id(tensor)], tensor
        for _, optimizer in self._tracked.optimizers:
            for parameter, state in optimizer.state.items():
                if isinstance(state, dict):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor):
                            yield f"{key} of {names.get(id(parameter), 'a parameter')}", value

    def _plan(self) -> list[list[_Unit]]:
        """Cut the state into parts; bundle small tensors."""
        largest = max(SMALL_BYTES, self._part_bytes // SLICES_OF_A_PART)
        parts: list[list[_Unit]] = [[]]
        size = 0
        bundles: dict[bool, _Unit] = {True: [], False: []}

        def add(unit: _Unit) -> None:
            nonlocal size
            if size >= self._part_bytes:
                parts.append([])
                size = 0
            parts[-1].append(unit)
            size += sum(piece.bits().nbytes for piece in unit)

        for name, tensor in self._tensors():
            local = local_part(tensor)
            if not local.nbytes or local.layout is not torch.strided or local.is_inference() or name in self._written:
                continue
            if local.nbytes <= SMALL_BYTES:
                bundle = bundles[name in self._unstable]
                bundle.append(_WatchedTensor(name, tensor, 0, 0))
                if len(bundle) == BUNDLED_TENSORS:
                    add(bundle)
                    bundles[name in self._unstable] = []
            elif local.is_contiguous():
                step = largest // local.element_size()
                for start, stop in pairwise([*range(0, local.numel(), step), local.numel()]):
                    add([_WatchedTensor(name, tensor, start, stop)])
            else:
                add([_WatchedTensor(name, tensor, 0, 0)])
        for bundle in bundles.values():
            if bundle:
                add(bundle)
        return parts

    # -- what the comparison showed

    def _resolve(self) -> None:
        if self._outcome is None:
            return
        outcome, self._outcome = self._outcome, None
        ranks = int(outcome.ranks.item())
        if not ranks:
            return
        where = [number for number, differs in enumerate(outcome.differs.tolist()) if differs]
        if not where:
            return
        units = [outcome.watched[number].unit for number in where]
        are_buffers = all(piece.name in self._buffers for unit in units for piece in unit)
        if ranks > 1 or are_buffers or 4 * len(where) > max(4, len(outcome.watched)):
            names = {piece.name for unit in units for piece in unit}
            if not self._written:
                words = _ON_ONE_RANK if ranks == 1 < self.setup.world_size else _BY_THE_PROGRAM
                log.warning(words, list_names(sorted(names), MAX_NAMED))
            self._written |= names
            return
        for number in where:
            self._report(outcome, number)

    def _report(self, outcome: _Outcome, number: int) -> None:
        watched, digest = outcome.watched[number], outcome.digests[number]
        first = watched.unit[0]
        name, difference = first.name, ""
        for piece, copy in zip(watched.unit, watched.copies, strict=False):
            if text := describe_difference(piece.bits(), copy):
                name, difference = piece.name, text
                break
        else:
            if len(watched.unit) > 1:
                name = list_names([piece.name for piece in watched.unit], MAX_NAMED)
        if first.stop:
            name += f"[{first.start}:{first.stop}]"
        self.report_own(
            outcome.step,
            f"{name} in memory",
            original=to_hex(watched.digest),
            digest=to_hex(digest),
            difference=difference,
        )


def _digest_of(unit: _Unit) -> torch.Tensor:
    return combined_digest([piece.bits() for piece in unit])
