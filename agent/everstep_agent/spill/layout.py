"""Divide a version's bytes among the ranks, and plan each rank's file. Pure: the same manifests give the same files.

State that several ranks store identically is written by one of them. A file is a sequence of torch archives: first
those of small values, then those of boxes in the order in which they lie in the slot, which is read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everstep.errors import ConfigurationError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import (
    BLOB_LENGTH_BYTES,
    Box,
    Extent,
    Manifest,
    Range,
    StoredBox,
    TensorInfo,
    byte_ranges,
    full_box,
)
from everstep_agent.spill.dcp_metadata import (
    ArchiveLocation,
    KeyPath,
    ObjectEntry,
    TensorChunk,
    TensorEntry,
    flat_key,
    flatten,
)
from everstep_agent.spill.torch_format import RawTensor, TensorArchive, object_archive

# Names of a job's tensors and small state: those under which ``torch.distributed.checkpoint.save`` stores what
# ``get_model_state_dict`` and ``get_optimizer_state_dict`` return, each under the key the object is tracked by:
# ``model.<name>``, ``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.0.lr``. An optimizer that trains
# several tracked modules names parameters with their modules' keys. Entries that only Everstep reads are under
# ``everstep``.

EVERSTEP_KEY = "everstep"


class CheckpointPaths:
    """The paths of one job's state. ``state`` is any rank's Python state; it shows which objects are optimizers."""

    def __init__(self, catalog: Sequence[TensorInfo], state: Mapping[str, Any]) -> None:
        self._optimizers = frozenset(state.get("groups", ()))
        self._parameter_groups: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._modules: dict[str, set[str]] = defaultdict(set)
        for tensor in catalog:
            for top, index in tensor.groups:
                self._parameter_groups[top][index].append(tensor.name)
                self._modules[top].add(tensor.name.partition(".")[0])

    def tensor_paths(self, tensor: TensorInfo) -> tuple[KeyPath, ...]:
        """Return a tensor's paths: one, and another for each alias of a tied tensor."""
        return tuple(map(self._path, (tensor.name, *tensor.aliases)))

    def _path(self, name: str) -> KeyPath:
        top, _, rest = name.partition(".")
        if top not in self._optimizers:
            return top, rest
        parameter, _, moment = rest.rpartition(".")
        return top, "state", self._parameter(top, parameter), moment

    def _parameter(self, optimizer: str, name: str) -> str:
        """Return a parameter's name in an optimizer's state: without its module's key, if there is only one module."""
        module, _, within = name.partition(".")
        return within if self._modules[optimizer] == {module} else name

    def shared_values(self, state: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
        """Yield the values stored once for the job: hyper-parameters, and the state of objects that are no modules."""
        for top, groups in state.get("groups", {}).items():
            for index, (_, group) in enumerate(groups):  # (this rank's parameter names, options)
                names = [self._parameter(top, name) for name in self._parameter_groups[top][index]]
                yield from flatten((top, "param_groups", index), {**group, "params": names})
        for key, value in state.get("objects", {}).items():
            yield from flatten((key,), value)

    def module_values(self, state: Mapping[str, Any]) -> Iterator[tuple[str, KeyPath, Any]]:
        """Yield modules' extra state, each with the module's full name."""
        for name, extra in state.get("extra", {}).items():
            top, _, module = name.partition(".")
            for path, value in flatten((top, f"{module}._extra_state" if module else "_extra_state"), extra):
                yield name, path, value

    def scalar_values(self, state: Mapping[str, Any]) -> Iterator[tuple[str, KeyPath, Any]]:
        """Yield optimizer state that is no tensor, with the full name of its parameter, or "" for none."""
        for top, parameters in state.get("scalars", {}).items():
            for name, values in parameters.items():
                of = (self._parameter(top, name),) if name else ()
                for path, value in flatten((top, "state", *of), values):
                    yield name, path, value


class WrittenBox(msgspec.Struct, frozen=True):
    """Box ``box`` of catalog tensor ``tensor_index``, from these byte ranges of a rank's payload."""

    tensor_index: int
    box: Box
    ranges: tuple[Range, ...]


class Division(msgspec.Struct, frozen=True):
    """The boxes that each rank writes, and for each tensor the rank that writes its first part."""

    boxes_by_rank: dict[int, tuple[WrittenBox, ...]]
    first_writers: tuple[int, ...]


def divide(manifests: Mapping[int, Manifest]) -> Division:
    """Assign every byte to one rank that stored it, with the least so far. Raises NotRestorable if some are missing."""
    if not manifests:
        raise NotRestorable("no node holds a slot of the version to be written to storage")
    ranks = sorted(manifests)
    catalog = manifests[ranks[0]].catalog
    holders: list[dict[Box, list[tuple[int, StoredBox]]]] = [defaultdict(list) for _ in catalog]
    for rank in ranks:
        if manifests[rank].catalog != catalog:
            raise NotRestorable("the slots of the version belong to different models")
        for stored in manifests[rank].stored:
            holders[stored.tensor][stored.box].append((rank, stored))
    shares: dict[int, list[WrittenBox]] = {rank: [] for rank in ranks}
    load = dict.fromkeys(ranks, 0)
    first = [ranks[0]] * len(catalog)
    for index, tensor in enumerate(catalog):
        parts = _parts(index, tensor, holders[index], load)
        for rank, written in parts:
            shares[rank].append(written)
        first[index] = parts[0][0] if parts else ranks[0]
        if not parts:
            shares[ranks[0]].append(WrittenBox(index, full_box(tensor.shape), ()))  # no bytes, but a shape and a dtype
    for share in shares.values():
        share.sort(key=lambda w: (w.ranges[0][0] if w.ranges else -1, w.tensor_index, w.box))
    return Division({rank: tuple(share) for rank, share in shares.items()}, tuple(first))


def _parts(
    index: int, tensor: TensorInfo, holders: Mapping[Box, list[tuple[int, StoredBox]]], load: dict[int, int]
) -> list[tuple[int, WrittenBox]]:
    """Return disjoint parts that make up the tensor, each with its writing rank; none if the tensor has no bytes."""
    rest = _required_boxes(tensor)
    parts: list[tuple[int, WrittenBox]] = []
    for box in sorted(holders, key=lambda b: (b.offset, -b.volume, b.size)):
        rank, stored = min(holders[box], key=lambda holder: (load[holder[0]], holder[0]))
        lacking: list[Box] = []
        for gap in rest:
            common = gap.intersect(box)
            if common is None:
                lacking.append(gap)
                continue
            lacking += gap.subtract(common)
            ranges = tuple(byte_ranges(stored.box, common, tensor.itemsize, stored.offset))
            parts.append((rank, WrittenBox(index, common, ranges)))
            load[rank] += common.volume * tensor.itemsize
        rest = lacking
    if rest:
        raise NotRestorable(f"{tensor.name}: the part at {rest[0].offset} of size {rest[0].size} is in no slot")
    return parts


def _required_boxes(tensor: TensorInfo) -> list[Box]:
    """Return the boxes that make up a tensor; for a per-rank tensor, the rows of its owner ranks."""
    everything = full_box(tensor.shape)
    if not tensor.per_rank or not everything.volume:
        return [everything] if everything.volume else []
    inner = (0,) * len(tensor.shape[1:])
    return [Box((row, *inner), (1, *tensor.shape[1:])) for row in tensor.owner_ranks]


class LiteralBytes(msgspec.Struct, frozen=True):
    """Bytes of a file that do not come from a slot."""

    data: bytes


class SlotArchive(msgspec.Struct, frozen=True):
    """A tensor's archive around bytes of the slot's payload."""

    archive: TensorArchive
    ranges: tuple[Range, ...]


def plan_file(
    rank: int, manifest: Manifest, division: Division, state: Mapping[str, object], blob_bytes: int, version: Version
) -> FilePlan:
    """Plan the file of one rank's share, whose Python state ``state`` takes ``blob_bytes`` bytes in its slot."""
    lowest = min(division.boxes_by_rank)
    names = CheckpointPaths(manifest.catalog, state)
    plan = FilePlan(f"__{rank}_0.distcp")
    if rank == lowest:
        numbers = b"".join(n.to_bytes(8, "little", signed=True) for n in (version.generation, version.step))
        plan.add_value((EVERSTEP_KEY, "version"), RawTensor("int64", (2,), numbers))
        for path, value in names.shared_values(state):
            plan.add_value(path, value)
    first_writers = dict(zip((tensor.name for tensor in manifest.catalog), division.first_writers, strict=True))
    for parameter, path, value in names.scalar_values(state):
        if rank == first_writers.get(parameter, lowest):
            plan.add_value(path, value)
    for module, path, value in names.module_values(state):
        if rank == next((writer for name, writer in first_writers.items() if name.startswith(f"{module}.")), lowest):
            plan.add_value(path, value)
    blob = (manifest.blob_offset + BLOB_LENGTH_BYTES, blob_bytes)
    plan.add_slot([(EVERSTEP_KEY, "blob", str(rank))], "uint8", 1, (blob_bytes,), full_box((blob_bytes,)), (blob,))
    for written in division.boxes_by_rank[rank]:
        tensor = manifest.catalog[written.tensor_index]
        plan.add_tensor(names.tensor_paths(tensor), tensor, written)
    return plan


class FilePlan:
    """One rank's file: its pieces, and its entries in ``.metadata``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.length = 0
        self.pieces: list[LiteralBytes | SlotArchive] = []
        self.tensors: list[TensorEntry] = []
        self.objects: list[ObjectEntry] = []

    def _place(self, length: int) -> ArchiveLocation:
        location = ArchiveLocation(self.name, self.length, length)
        self.length += length
        return location

    def add_value(self, path: KeyPath, value: object) -> None:
        """Add a small value; a tensor becomes a tensor entry. Others are only in Everstep's own Python state."""
        try:
            data = object_archive(value)
        except (ConfigurationError, MalformedMessage):
            return
        location = self._place(len(data))
        self.pieces.append(LiteralBytes(data))
        if isinstance(value, RawTensor):
            chunk = TensorChunk(full_box(value.shape), location)
            self.tensors.append(TensorEntry(path, value.dtype, value.shape, (chunk,)))
        else:
            self.objects.append(ObjectEntry(path, location))

    def add_tensor(self, paths: Sequence[KeyPath], tensor: TensorInfo, box_to_write: WrittenBox) -> None:
        """Add a part of a tensor. Per-rank ones are under Everstep's key, the first owner's also at the usual path."""
        shape, box = tensor.shape, box_to_write.box
        if tensor.per_rank:
            row = box.offset[0]
            shape, box = shape[1:], Box(box.offset[1:], box.size[1:])
            paths = [(EVERSTEP_KEY, "own", str(row), tensor.name), *(paths if row == tensor.owner_ranks[0] else ())]
        self.add_slot(paths, tensor.dtype, tensor.itemsize, shape, box, box_to_write.ranges)

    def add_slot(
        self, paths: Iterable[KeyPath], dtype: str, itemsize: int, shape: Extent, box: Box, ranges: tuple[Range, ...]
    ) -> None:
        """Add a box whose bytes are in the slot, under each of the paths."""
        archive = TensorArchive(dtype, itemsize, box.size)
        chunk = TensorChunk(box, self._place(archive.length))
        self.pieces.append(SlotArchive(archive, ranges))
        self.tensors += [TensorEntry(path, dtype, shape, (chunk,)) for path in paths]


def merge_entries(
    files: Iterable[tuple[Sequence[TensorEntry], Sequence[ObjectEntry]]],
) -> tuple[list[TensorEntry], list[ObjectEntry]]:
    """Merge all files' entries: join tensors' parts, take the first of a path's values, leave out clashing paths."""
    tensors: dict[KeyPath, TensorEntry] = {}
    objects: dict[KeyPath, ObjectEntry] = {}
    for some_tensors, some_objects in files:
        for entry in some_tensors:
            known = tensors.get(entry.path)
            if known is None:
                tensors[entry.path] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise MalformedMessage(f"two files disagree about the shape or dtype of {flat_key(entry.path)}")
            else:
                tensors[entry.path] = msgspec.structs.replace(known, chunks=known.chunks + entry.chunks)
        for value in some_objects:
            objects.setdefault(value.path, value)
    used_keys = set(map(flat_key, tensors))
    plain: dict[str, ObjectEntry] = {}
    for value in objects.values():
        key = flat_key(value.path)
        if key not in used_keys and value.path[0] != EVERSTEP_KEY:
            plain.setdefault(key, value)
    return list(tensors.values()), list(plain.values())
