"""Slot bytes into live tensors: this node's slots straight from their mapping, others' through the vault.

Nothing is used unchecked: of a local slot the chunks that are read are hashed, here or by the rank that wrote it; what
comes from elsewhere was hashed by the two vaults. A slot that fails is named, never guessed around.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from everstep.boxes import Range, byte_ranges
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage
from everstep.slots import PAGE
from everstep.wire.v1.local import Fetched, SlotInfo
from everstep.wire.v1.training import Member
from trainer_hooks.restore.local import BadSlot, LocalSlots, as_tensor, map_readable
from trainer_hooks.restore.reshard import Read, box_to_fetch
from trainer_hooks.snapshot.copy import part_of, slot_view
from trainer_hooks.snapshot.layout import ALIGN, BLOB_PREFIX, Box, Manifest, Tensor
from trainer_hooks.vault_client import VaultClient

RANGES_PER_FETCH = 1 << 16
"""A quarter of what a vault takes in one request."""
KEPT_SCRATCH_BYTES = 64 << 20
"""First touch of 64 MiB costs some 50 ms, more than all the rest of a small restore; more memory than that is not held
for the next one. The file goes with the job."""


NOTHING_READ = {"own": 0, "node": 0, "remote": 0, "parity": 0}


class Supply(msgspec.Struct, frozen=True):
    """A slot to read from, with its manifest."""

    slot: SlotInfo
    manifest: Manifest

    def tensor(self, read: Read) -> Tensor:
        return self.manifest.catalog[read.stored.tensor]

    @property
    def blob_range(self) -> Range:
        return self.manifest.blob_at, BLOB_PREFIX + self.manifest.blob_capacity


class Target(Protocol):
    """Live memory to fill: ``local`` is a view with the size of ``box``, which lies in the whole tensor. What is a
    parameter is sent for first."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def box(self) -> Box: ...

    @property
    def parameter(self) -> bool: ...


class Landed(msgspec.Struct, frozen=True):
    """A read whose source box ``box`` lies contiguously at byte ``at`` of some bytes."""

    read: Read
    box: Box
    at: int


class _Arrival(msgspec.Struct):
    """One remote slot's bytes on their way to the scratch file; ``blob_at`` is None where none is fetched."""

    supply: Supply
    landed: list[Landed]
    blob_at: int | None
    answers: list[Future[Fetched]]


class Loader:
    """Carries out a plan of reads.

    Args:
        member: this rank; slots on its node are read directly.
        targets: what each want of the plan fills.
        local: the slots of this rank's node.
        has_checker: whether a slot of this node is hashed by somebody whose word is heard before anything is used.
    """

    def __init__(
        self,
        vault: VaultClient,
        job: str,
        member: Member,
        targets: Sequence[Target],
        local: LocalSlots,
        has_checker: Callable[[SlotInfo], bool] = lambda _: False,
    ) -> None:
        self._vault = vault
        self._job = job
        self._member = member
        self._targets = targets
        self._local = local
        self._has_checker = has_checker
        self._scratch: Path | None = None
        self._scratch_bytes = 0
        self.bytes_by_source = dict(NOTHING_READ)

    def load(self, reads: Sequence[Read], supplies: Sequence[Supply], blob_of: int) -> tuple[bytes, list[BadSlot]]:
        """Fills the targets; returns the Python state of supply ``blob_of``, and the slots that failed.

        Where any failed, what was filled is not to be used.
        """
        self.bytes_by_source = dict(NOTHING_READ)
        self._scratch_bytes = 0
        of_supply: dict[int, list[Read]] = defaultdict(list)
        of_supply[blob_of] = []
        for read in reads:
            of_supply[read.supply].append(read)
        local = {i: r for i, r in of_supply.items() if supplies[i].slot.is_on(self._member.node)}
        remote = {i: r for i, r in of_supply.items() if i not in local}
        arrivals = self._send(remote, supplies, blob_of, parameters=True)
        arrivals += self._send(remote, supplies, blob_of, parameters=False)
        blobs: list[bytes] = []
        failures: list[BadSlot] = []
        for index, mine in local.items():
            try:
                blobs.append(self._read_local(supplies[index], mine, index == blob_of))
            except BadSlot as failure:
                failures.append(failure)
        blobs += self._receive(arrivals, failures)
        return b"".join(blobs), failures

    def python_state(self, supply: Supply) -> bytes:
        """One more slot's Python state. Raises BadSlot."""
        if supply.slot.is_on(self._member.node):
            return self._read_local(supply, [], with_blob=True)
        self._scratch_bytes = 0
        failures: list[BadSlot] = []
        blobs = self._receive([self._send_for(supply, [], with_blob=True)], failures)
        if failures:
            raise failures[0]
        return blobs[0]

    def fetch_manifest(self, slot: SlotInfo) -> bytes:
        """A remote slot's manifest. Raises what the vault answers, Unavailable where it does not."""
        into = self._scratch_file()
        landed: Fetched = self._vault.fetch(
            job=self._job,
            node=slot.node,
            rank=slot.rank,
            version=slot.version,
            ranges=(),
            into=str(into),
            group=slot.group,
        ).result()
        with into.open("rb") as file:
            return file.read(landed.bytes)

    def close(self) -> None:
        """Removes the scratch file, unless it is small: then its pages stay for the next restore of this local rank."""
        if self._scratch is not None and self._scratch_bytes > KEPT_SCRATCH_BYTES:
            self._scratch.unlink(missing_ok=True)
        self._scratch = None

    def _copy(self, data: torch.Tensor, supply: Supply, landed: list[Landed]) -> None:
        """Copies what landed in ``data`` to its targets."""
        sources, targets = [], []
        for item in landed:
            tensor, target = supply.tensor(item.read), self._targets[item.read.want]
            here = part_of(slot_view(data, item.at, tensor.dtype, item.box.size), item.box, item.read.box)
            box = item.read.box
            if tensor.own:
                here, box = here[0], Box(box.offset[1:], box.size[1:])
            sources.append(here)
            targets.append(part_of(target.local, target.box, box))
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(targets, sources)

    def _count(self, supply: Supply, reads: list[Read]) -> None:
        slot = supply.slot
        kind = "node" if slot.is_on(self._member.node) else "parity" if slot.group else "remote"
        if kind == "node" and slot.rank == self._member.rank and not slot.replica:
            kind = "own"
        self.bytes_by_source[kind] += sum(r.box.volume * supply.tensor(r).itemsize for r in reads)

    # --- this node's slots

    def _read_local(self, supply: Supply, reads: list[Read], with_blob: bool) -> bytes:
        """Fills the reads' targets; returns the Python state if it is wanted. Raises BadSlot."""
        landed = [Landed(read, read.stored.box, read.stored.at) for read in reads]
        touched = [(item.at, item.box.volume * supply.tensor(item.read).itemsize) for item in landed]
        if with_blob:
            touched.append(supply.blob_range)
        payload = self._local.payload(supply.slot, () if self._has_checker(supply.slot) else touched)
        self._copy(payload, supply, landed)
        blob = _blob(payload, supply.manifest.blob_at) if with_blob else b""
        self._local.require_still(supply.slot)
        self._count(supply, reads)
        return blob

    # --- other nodes' slots

    def _send(
        self, reads: dict[int, list[Read]], supplies: Sequence[Supply], blob_of: int, *, parameters: bool
    ) -> list[_Arrival]:
        """Asks for what the reads of each supply give of parameters, and its Python state; or for all the rest."""
        arrivals = []
        for index, mine in reads.items():
            some = [read for read in mine if self._targets[read.want].parameter is parameters]
            with_blob = parameters and index == blob_of
            if some or with_blob:
                arrivals.append(self._send_for(supplies[index], some, with_blob))
        return arrivals

    def _send_for(self, supply: Supply, reads: list[Read], with_blob: bool) -> _Arrival:
        """Asks the vault for all that a remote slot gives, and says where it will land in the scratch file."""
        start = at = -(-self._scratch_bytes // ALIGN) * ALIGN
        ranges: list[Range] = []
        landed: list[Landed] = []
        for read in sorted(reads, key=lambda r: -supply.tensor(r).itemsize):  # so that each begins aligned
            itemsize = supply.tensor(read).itemsize
            box = box_to_fetch(read.stored.box, read.box)
            ranges += byte_ranges(read.stored.box, box, itemsize, read.stored.at)
            landed.append(Landed(read, box, at))
            at += box.volume * itemsize
        blob_at = at if with_blob else None
        if with_blob:
            ranges.append(supply.blob_range)
            at += supply.blob_range[1]
        self._scratch_bytes = at
        return _Arrival(supply, landed, blob_at, self._fetches(supply.slot, ranges, start))

    def _fetches(self, slot: SlotInfo, ranges: list[Range], at: int) -> list[Future[Fetched]]:
        answers = []
        for first in range(0, len(ranges), RANGES_PER_FETCH):
            some = tuple(ranges[first : first + RANGES_PER_FETCH])
            answers.append(
                self._vault.fetch(
                    job=self._job,
                    node=slot.node,
                    rank=slot.rank,
                    version=slot.version,
                    ranges=some,
                    into=str(self._scratch_file()),
                    into_offset=at,
                    group=slot.group,
                )
            )
            at += sum(length for _, length in some)
        return answers

    def _scratch_file(self) -> Path:
        """Beside this rank's segment; a rank that has none yet gets the smallest."""
        if self._scratch is None:
            segment = self._vault.open_segment(self._job, self._member.local_rank, PAGE, slots=1)
            self._scratch = Path(segment.directory) / f"scratch-{self._member.local_rank}"
        return self._scratch

    def _receive(self, arrivals: list[_Arrival], failures: list[BadSlot]) -> list[bytes]:
        """Waits for everything that was sent for, and copies it. Returns the Python state if it was among it."""
        good: list[_Arrival] = []
        for arrival in arrivals:
            try:
                for answer in arrival.answers:
                    answer.result()
                good.append(arrival)
            except EverstepError as error:
                corrupt = isinstance(error, DigestMismatch)
                if all(failure.slot is not arrival.supply.slot for failure in failures):
                    failures.append(BadSlot(arrival.supply.slot, str(error), corrupt=corrupt))
        if not good:
            return []
        blobs = []
        data = as_tensor(map_readable(str(self._scratch_file()), self._scratch_bytes))
        for arrival in good:
            self._copy(data, arrival.supply, arrival.landed)
            self._count(arrival.supply, [item.read for item in arrival.landed])
            if arrival.blob_at is not None:
                blobs.append(_blob(data, arrival.blob_at))
        return blobs


def _blob(data: torch.Tensor, at: int) -> bytes:
    """Raises MalformedMessage where the length before it cannot be."""
    length = int.from_bytes(data[at : at + BLOB_PREFIX].numpy().tobytes(), "little")
    if length > data.numel() - at - BLOB_PREFIX:
        raise MalformedMessage(f"a slot's Python state says that it has {length} bytes")
    return data[at + BLOB_PREFIX : at + BLOB_PREFIX + length].numpy().tobytes()
