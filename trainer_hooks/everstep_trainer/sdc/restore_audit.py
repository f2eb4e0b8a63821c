"""Audit restores: the restored tensors must have the digests that were kept when the version was copied.

Bytes are hashed up to the slot from which a rank reads. The last copy, from there into live tensors, has no other
check. `everstep_trainer.sdc.copy_audit` keeps the digests of whole stored boxes. So a box of which a rank restores only
a part, for another layout, is not compared.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import to_hex, to_unsigned
from everstep_trainer.digests.piece_digests import digest_at, digest_at_places
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.witnesses import describe_difference
from everstep_trainer.slots.local_slots import BadSlot, SlotDiffersFromState

if TYPE_CHECKING:
    from everstep_trainer.slots.fetch import FilledPiece, SlotLoader

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
"""Bytes of tensors that are digested and compared together."""
MAX_CHECK_S = 2.0
"""Seconds after which no further tensors are compared: about 20 GB on one core, and everything on a GPU. What is left
out is chosen at random, on each rank anew."""

ReadAgain = Callable[["Sequence[FilledPiece]"], list[torch.Tensor]]
"""Returns the stored bytes of pieces of one slot, in fresh memory. Raises BadSlot."""


class RestoreAudit:
    """Compares what one rank restored. ``report`` receives tensors that differ although the slot's bytes are right.

    Attributes:
        refuses_version: Such tensors stayed wrong when they were filled again, so the version must not be used here.
    """

    def __init__(self, rank: int, report: Callable[[Mismatch], None]) -> None:
        self._rank, self._report = rank, report
        self.refuses_version = False

    def check(self, loader: SlotLoader, read_again: ReadAgain) -> list[BadSlot]:
        """Compare the filled tensors; fill again those that are wrong. Return the slots whose bytes are wrong."""
        self.refuses_version = False
        failures: list[BadSlot] = []
        by_slot: dict[tuple[str, int, bool], list[FilledPiece]] = defaultdict(list)
        for piece in find_wrong(loader.filled_pieces):
            slot = piece.source.slot
            by_slot[slot.node, slot.rank, slot.replica].append(piece)
        for pieces in by_slot.values():
            slot = pieces[0].source.slot
            try:
                for number, portion in enumerate(_batches(pieces)):  # bounds the host memory for what is read again
                    self._resolve(portion, read_again(portion), is_first=not number)
                    if self.refuses_version:
                        break
            except BadSlot as bad:
                failures.append(bad)
                loader.drop(slot)
        return failures

    def _resolve(self, pieces: Sequence[FilledPiece], stored: Sequence[torch.Tensor], *, is_first: bool) -> None:
        """Find out whether the slot or this rank is wrong. Raises SlotDiffersFromState if it is the slot. The rank is
        reported once, with the ``is_first`` pieces of the slot."""
        for piece, tensor in zip(pieces, stored, strict=True):
            if to_unsigned(digest_at(tensor, piece.place)) != _unsigned(piece):
                reason = f"{piece.name} is not what was copied into it: its digest is another one"
                raise SlotDiffersFromState(piece.source.slot, reason, is_corrupt=True)
        version = pieces[0].source.slot.version
        if is_first:
            self._state(pieces[0], stored[0], f"restore of version {version}")
        with torch.no_grad():
            for piece, tensor in zip(pieces, stored, strict=True):
                piece.live.copy_(tensor)
        for piece, tensor in zip(pieces, stored, strict=True):
            if _differs([piece]):
                log.error("%s is still wrong after it was restored again: version %s is refused", piece.name, version)
                self.refuses_version = True
                self._state(piece, tensor, f"second restore of version {version}")
                return

    def _state(self, piece: FilledPiece, right: torch.Tensor, unit: str) -> None:
        self._report(
            Mismatch(
                audit=AuditKind.CHECKPOINT,
                step=piece.source.slot.version.step,
                unit=unit,
                owner=self._rank,
                role=AuditRole.OWNER,
                original=f"{_unsigned(piece):016x}",
                digest=to_hex(digest_at(piece.live, piece.place)),
                difference=f"{piece.name}: {describe_difference(piece.live, right)}",
            )
        )


def find_wrong(pieces: Iterable[FilledPiece]) -> list[FilledPiece]:
    """Return the pieces that differ from their digests, of as many as can be compared in `MAX_CHECK_S`."""
    batches = list(_batches(pieces))
    random.Random().shuffle(batches)
    began, wrong = perf_counter(), []
    for number, batch in enumerate(batches):
        if number and perf_counter() - began > MAX_CHECK_S:
            log.info(
                "%d of %d parts of the restored state were not audited for lack of time",
                len(batches) - number,
                len(batches),
            )
            break
        if _differs(batch):
            wrong += [piece for piece in batch if _differs([piece])]
    return wrong


def _batches(pieces: Iterable[FilledPiece]) -> Iterator[list[FilledPiece]]:
    """Yield pieces of one slot and one device, about `BATCH_BYTES` at once."""
    open_batches: dict[tuple[int, torch.device], list[FilledPiece]] = defaultdict(list)
    sizes: dict[tuple[int, torch.device], int] = defaultdict(int)
    for piece in pieces:
        key = id(piece.source), piece.live.device
        open_batches[key].append(piece)
        sizes[key] += piece.live.nbytes
        if sizes[key] >= BATCH_BYTES:
            yield open_batches.pop(key)
            del sizes[key]
    yield from open_batches.values()


def _differs(pieces: Sequence[FilledPiece]) -> bool:
    found = digest_at_places([piece.live for piece in pieces], [piece.place for piece in pieces])
    return (to_unsigned(found) - sum(piece.digest for piece in pieces)) % (1 << 64) != 0


def _unsigned(piece: FilledPiece) -> int:
    return piece.digest % (1 << 64)
