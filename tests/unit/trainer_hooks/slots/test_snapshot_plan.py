"""The division of state among ranks: whole, on enough nodes, balanced, and the same on every rank."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.layout.manifests import Box, encode_manifest, full_box, uncovered
from everstep.layout.segment_header import PAGE_BYTES
from everstep.layout.slots import slot_bytes_for
from everstep.wire.v1.local import CheckCapacity, SegmentRequirement
from everstep.wire.v1.training import JobSpec
from everstep_trainer.slots.layout_exchange import LayoutRound
from everstep_trainer.slots.shares import (
    RankShare,
    SharePiece,
    build_manifest,
    divide_state,
    payload_bytes,
    translate_share,
    unify_sharing,
)
from everstep_trainer.slots.version_choice import is_fully_covered
from everstep_trainer.snapshot.planner import MIN_BLOB_BYTES, SnapshotPlanner
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.layout import Layout, Sharing, TensorPart
from tests.support.fleet.generations import JOB, generation


def part(name: str, shape: tuple[int, ...], box: Box | None = None, **more: object) -> TensorPart:
    return TensorPart(name, "float32", 4, shape, box or full_box(shape), **more)  # type: ignore[arg-type]


def replicated(sizes: list[int], world: int) -> list[Layout]:
    layout = Layout(tuple(part(f"t{i}", (n, 8), is_digested=True) for i, n in enumerate(sizes)))
    return [layout] * world


def sharded(rows: int, world: int) -> list[Layout]:
    chunk = -(-rows // world)
    layouts = []
    for rank in range(world):
        start = min(rows, rank * chunk)
        box = Box((start, 0), (min(rows, start + chunk) - start, 8))
        layouts.append(Layout((part("shard", (rows, 8), box, is_digested=True), part("step", ()))))
    return layouts


@pytest.mark.promise("node-loss")
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_replicated_bytes_lie_on_the_requested_number_of_nodes(
    sizes: list[int], nodes: int, per_node: int, replicas: int
) -> None:
    world = nodes * per_node
    where = [f"n{rank // per_node}" for rank in range(world)]
    layouts = replicated(sizes, world)
    shares = divide_state(layouts, where, replicas)
    for index, tensor in enumerate(layouts[0].parts):
        holders: dict[Box, set[str | int]] = {}
        for rank, share in enumerate(shares):
            place = rank if nodes == 1 else where[rank]
            for piece in share.pieces:
                if piece.part == index:
                    assert place not in holders.setdefault(piece.box, set()) or tensor.nbytes <= 64
                    holders[piece.box].add(place)
        assert not uncovered(full_box(tensor.shape), sorted(holders))
        assert sum(box.volume for box in holders) == tensor.box.volume
        assert all(len(at) >= min(replicas, nodes) for at in holders.values())
    assert all(piece.is_exclusive == (1 < nodes < replicas) for share in shares for piece in share.pieces)


def test_equal_state_is_divided_among_independent_nodes() -> None:
    nodes, apart = ["n1", "n2", "n3", "n4"], {"n1": ("n3",), "n2": ("n4",), "n3": ("n1",), "n4": ("n2",)}
    shares = divide_state(replicated([512 * 16] * 8, 4), nodes, 2, apart)
    assert {node: share.partial_copies for node, share in zip(nodes, shares, strict=True)} == apart
    loads = [sum(p.box.volume * 4 for p in share.pieces) for share in shares]
    assert max(loads) <= 1.05 * min(loads)


def test_dependent_nodes_are_used_and_named_if_unavoidable() -> None:
    halves = sharded(4096, 2)
    shares = divide_state([*halves, *halves], ["n1", "n2", "n3", "n4"], 2, {"n1": ("n2",), "n3": ("n4",)})
    assert [share.partial_copies for share in shares] == [("n3",), ("n4",), ("n1",), ("n2",)]


@pytest.mark.promise("finished-step-survives")
def test_single_node_stores_each_byte_once() -> None:
    layouts = replicated([512 * 16] * 8 + [1] * 40, 4)
    shares = divide_state(layouts, ["n1"] * 4, 2)
    stored = [sum(p.box.volume * 4 for p in share.pieces) for share in shares]
    assert sum(stored) <= 1.01 * sum(p.nbytes for p in layouts[0].parts)
    assert max(stored) <= 1.1 * min(stored)


@pytest.mark.promise("finished-step-survives")
def test_share_of_another_rank_is_translated_if_held_whole() -> None:
    weight, first, own = part("w", (4096, 8)), part("b", (64,)), part("m", (2, 64), Box((0, 0), (1, 64)))
    theirs = Layout((weight, msgspec.structs.replace(first, sharing=Sharing.FIRST_RANK)))
    mine = Layout((part("other", (3,)), weight))
    rows = RankShare((SharePiece(0, Box((0, 0), (2048, 8)), False),), {})
    assert translate_share(rows, theirs, mine) == RankShare((SharePiece(1, Box((0, 0), (2048, 8)), False),), {})
    half = Layout((part("w", (4096, 8), Box((0, 0), (1024, 8))),))
    assert translate_share(rows, theirs, half) is None, "the layout holds a half of the piece"
    assert translate_share(rows, theirs, Layout(())) is None
    counts = RankShare((SharePiece(1, full_box((64,)), False),), {})
    assert translate_share(counts, theirs, theirs) is None, "only the first rank counts"
    moments = Layout((msgspec.structs.replace(own, sharing=Sharing.PER_RANK),))
    assert translate_share(RankShare((SharePiece(0, own.box, False),), {}), moments, moments) is None


def test_hybrid_shards_are_divided_and_vote_among_equal_holders() -> None:
    halves = sharded(10, 2)
    shares = divide_state([*halves, *halves], ["n1", "n1", "n2", "n2"], 2)
    assert [set(share.digest_groups) for share in shares] == [{"replicated-0"}, {"replicated-1"}] * 2
    assert not any(piece.is_exclusive for share in shares for piece in share.pieces)


def test_manifest_orders_exclusive_bytes_first_without_overlap() -> None:
    layouts = sharded(10, 4)
    shares = divide_state(layouts, ["n1", "n2", "n3", "n4"], 2)
    manifest = build_manifest(1, layouts, shares[1], blob_capacity=100, digests=True)
    start, length = manifest.digests_range
    assert start + length <= manifest.exclusive_bytes
    spans = [(start, start + length), *((s.offset, s.offset + s.box.volume * 4) for s in manifest.stored)]
    spans.append((manifest.blob_offset, manifest.blob_offset + 8 + 100))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= manifest.payload_bytes
    assert manifest.stored[0].offset < manifest.blob_offset < manifest.exclusive_bytes <= manifest.stored[1].offset
    assert {t.name for t in manifest.catalog} == {"shard", "step"}


def stages() -> list[Layout]:
    """Return two stages of a pipeline on two ranks each. First and last layer are tied; statistics differ by rank."""

    def own(name: str, rank: int) -> TensorPart:
        return part(name, (4, 3), Box((rank, 0), (1, 3)), sharing=Sharing.PER_RANK)

    first = [part("tied", (64, 8), is_digested=True), part("low", (64, 8), is_digested=True)]
    last = [part("tied", (64, 8), is_digested=True), part("high", (64, 8), is_digested=True)]
    return [Layout((*(first if rank % 2 == 0 else last), own(f"seen{rank % 2}", rank))) for rank in range(4)]


@pytest.mark.parametrize(("most", "own"), [(Sharing.PER_RANK, True), (Sharing.FIRST_RANK, False)])
def test_buffer_changing_on_one_rank_is_shared_on_all(most: Sharing, own: bool) -> None:
    constant, other = part("mask", (4, 8)), part("t", (4, 8))
    row = Box((2, 0, 0), (1, 4, 8))
    seen = part("mask", (3, 4, 8), row, sharing=most) if own else part("mask", (4, 8), sharing=most)
    plain = Layout((constant, other))
    layouts = unify_sharing([plain, plain, Layout((seen, other))])
    assert [layout.parts[1] for layout in layouts] == [other] * 3
    assert [layout.parts[0].sharing for layout in layouts] == [most] * 3
    shares = divide_state(layouts, ["n1", "n2", "n3"], 2)
    manifests = [build_manifest(rank, layouts, share, 0) for rank, share in enumerate(shares)]
    assert manifests[0].catalog == manifests[1].catalog == manifests[2].catalog
    holders = [
        {m.rank for m in manifests for s in m.stored if m.catalog[s.tensor].name == "mask" and s.box == box}
        for box in (Box((rank, 0, 0), (1, 4, 8)) for rank in range(3))
    ]
    assert holders == [{0}, {1}, {2}] if own else layouts[0] is layouts[1]


def test_ranks_vote_only_with_holders_of_the_same_state() -> None:
    layouts = stages()
    shares = divide_state(layouts, ["n1", "n2", "n3", "n4"], 2)
    assert [set(share.digest_groups) for share in shares] == [
        {"replicated", "replicated-0"},
        {"replicated", "replicated-1"},
    ] * 2
    three = [*layouts[:3], Layout(layouts[1].parts[1:2])]  # what 0 shares with 2, it shares in part with 1 as well
    groups = [share.digest_groups for share in divide_state(three, ["n1", "n2", "n3", "n4"], 2)]
    assert [set(g) for g in groups] == [
        {"replicated-0", "replicated-0.2"},
        {"replicated-0", "replicated-1"},
        {"replicated-0", "replicated-0.2"},
        {"replicated-1"},
    ]


def test_per_rank_stage_state_is_whole_with_the_stage_ranks() -> None:
    layouts = stages()
    shares = divide_state(layouts, ["n1", "n2", "n3", "n4"], 1)
    manifests = [build_manifest(rank, layouts, shares[rank], 0) for rank in range(4)]
    (seen,) = [t for t in manifests[0].catalog if t.name == "seen1"]
    assert (seen.shape, seen.ranks) == ((4, 3), (1, 3))
    assert [seen.source_rank(rank) for rank in range(4)] == [1, 1, 1, 3]
    index = manifests[0].catalog.index(seen)
    boxes = [{s.box for m in some for s in m.stored if s.tensor == index} for some in (manifests, manifests[:2])]
    assert [is_fully_covered(seen, held) for held in boxes] == [True, False]


def test_tensor_name_conflict_between_ranks_is_refused() -> None:
    layouts = [Layout((part("t", (4, 8)),)), Layout((part("t", (5, 8)),))]
    shares = divide_state(layouts, ["n1", "n2"], 1)
    with pytest.raises(ValueError, match="ranks disagree about t"):
        build_manifest(0, layouts, shares[0], 0)


class MirroredExchange:
    """An exchange in which every node sends the same as this one."""

    def __init__(self) -> None:
        self._body = b""

    def put(self, _key: str, body: bytes) -> None:
        self._body = body

    def get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        return [self._body] * len(keys)


class SegmentRequested(Exception):
    """Raised with the size of the requested slots."""


def test_slot_has_room_for_the_share_after_a_loss() -> None:
    class Layouts(MirroredExchange):
        def layouts(self, mine: Layout, since: int, _timeout_s: float) -> LayoutRound:
            return LayoutRound(0, [mine] * 2, since)

    class Vault:
        def check_room(self, asked: CheckCapacity) -> None:
            foreseen.extend(asked.needs)

        def open_segment(self, _job: str, _local_rank: int, slot_bytes: int, slots: int, _keep: object) -> None:
            raise SegmentRequested(slot_bytes, slots)

    foreseen: list[SegmentRequirement] = []
    (layout, _) = replicated([1 << 16] * 4, 2)
    whole = sum(part.nbytes for part in layout.parts)
    spec = generation(1, ranks=[("n1", 0), ("n2", 0)])
    planner = SnapshotPlanner(Vault(), spec, spec.roster[0], Layouts(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(SegmentRequested) as asked:
        planner.plan(layout, 0, 0)
    assert whole < asked.value.args[0] < 1.05 * whole
    assert [(need.replica, need.number) for need in foreseen] == [(False, 0)]
    assert (foreseen[0].slots, foreseen[0].slot_bytes) == (5, -(-asked.value.args[0] // PAGE_BYTES) * PAGE_BYTES)


@pytest.mark.parametrize("nodes", [["n1", "n2"], ["n1", "n1"]])
def test_job_short_of_memory_gets_two_slots_of_its_share(nodes: list[str]) -> None:
    class Layouts(MirroredExchange):
        def layouts(self, mine: Layout, since: int, _timeout_s: float) -> LayoutRound:
            return LayoutRound(0, [mine] * 2, since)

    class Vault:
        def check_room(self, asked: CheckCapacity) -> None:
            foreseen.extend(asked.needs)

        def open_segment(self, _job: str, _local_rank: int, slot_bytes: int, slots: int, _keep: object) -> None:
            raise SegmentRequested(slot_bytes, slots)

    foreseen: list[SegmentRequirement] = []
    layouts = replicated([1 << 16] * 4, 2)
    spec = generation(1, ranks=[(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)])
    planner = SnapshotPlanner(Vault(), spec, spec.roster[0], Layouts(), 1.0, SnapshotOptions(slots=2))  # type: ignore[arg-type]
    with pytest.raises(SegmentRequested) as asked:
        planner.plan(layouts[0], 0, 0)
    share = divide_state(layouts, nodes, spec.spec.replicas, spec.replica_nodes)[0]
    manifest = build_manifest(0, layouts, share, MIN_BLOB_BYTES)
    stored = sum(piece.box.volume * layouts[0].parts[piece.part].itemsize for piece in share.pieces)
    slot_bytes, slots = asked.value.args
    assert slots == 2
    assert slot_bytes == slot_bytes_for(len(encode_manifest(manifest)), manifest.payload_bytes)
    assert stored < slot_bytes < stored + MIN_BLOB_BYTES + 2 * PAGE_BYTES
    assert (foreseen[0].slots, foreseen[0].slot_bytes) == (2, -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES)
    assert [need.number for need in foreseen] == list(range(nodes.count("n1")))


@pytest.mark.promise("memory-fits")
def test_vault_memory_forecast_includes_slots_and_copies() -> None:
    """Shards on two nodes of two ranks each, each node the home of the other's copies; two slots more for parity."""

    class Layouts(MirroredExchange):
        def layouts(self, _mine: Layout, since: int, _timeout_s: float) -> LayoutRound:
            return LayoutRound(0, layouts, since)

    class Vault:
        def check_room(self, asked: CheckCapacity) -> None:
            raise SegmentRequested(asked.needs)

    layouts = sharded(1 << 16, 4)
    job = JobSpec(job=JOB, max_nodes=2, nproc_per_node=2, parity_group_size=2)
    spec = generation(1, ranks=[("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)], spec=job)
    spec = msgspec.structs.replace(spec, replica_nodes={"n1": ("n2",), "n2": ("n1",)})
    planner = SnapshotPlanner(Vault(), spec, spec.roster[2], Layouts(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(SegmentRequested) as asked:
        planner.plan(layouts[2], 0, 0)
    (needs,) = asked.value.args
    assert [(need.replica, need.number) for need in needs] == [(False, 0), (False, 1), (True, 0), (True, 1)]
    shard = layouts[0].parts[0].nbytes
    for need in needs:
        assert 2 * shard < need.slot_bytes < 2 * shard + 2 * MIN_BLOB_BYTES + 6 * PAGE_BYTES  # as after a loss
        assert (need.slots, need.pinned_slots) == (5, 2)


@pytest.mark.parametrize("nodes", [["n1", "n2"], ["n1", "n1"]])
def test_share_size_is_known_without_its_manifest(nodes: list[str]) -> None:
    for layouts in (replicated([1 << 16, 3, 1000], 2), sharded(1001, 2)):
        for rank, share in enumerate(divide_state(layouts, nodes, 2)):
            for digests in (False, True):
                made = build_manifest(rank, layouts, share, 5000, digests=digests)
                assert payload_bytes(layouts[rank], share, 5000, digests=digests) == made.payload_bytes
                assert made.digests_range[1] == (8 * (1 + len(made.stored)) if digests else 0)
