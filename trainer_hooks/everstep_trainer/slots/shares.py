"""Divide the state among ranks: a pure function from every rank's layout to every rank's share.

State that several ranks hold alike is divided so that each byte is on ``replicas`` different nodes and no rank stores
more than it must. The vault of a rank sends on state that it alone holds. If all ranks are on one node, one rank stores
each byte; others that hold it live store it for that rank if it dies before (docs/decisions/0114).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from everstep.layout.manifests import (
    BLOB_LENGTH_BYTES,
    LAYOUT_FORMAT,
    PIECE_DIGEST_BYTES,
    Box,
    Manifest,
    StoredBox,
    TensorInfo,
)
from everstep.layout.segment_header import PAGE_BYTES
from everstep.wire.v1.local import SegmentRequirement
from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.state.layout import Layout, Sharing, TensorPart, aligned

MIN_CUT_BYTES = 64 << 10
"""Tensors are not cut below this: a piece costs about a microsecond to copy, which equals 16 KiB of memory traffic."""
SCALAR_BYTES = 64
"""Every holder stores boxes up to this size (step counters), so that no holder must ask another for a few bytes."""
CUTS_PER_HOLDER = 4
"""Pieces of at most 1/4 of a holder's fair share keep the shares within a few percent of each other."""


class SharePiece(msgspec.Struct, frozen=True, order=True):
    """A box to store of part ``part`` (index in the rank's own layout). ``is_exclusive``: too few nodes hold it."""

    part: int
    box: Box
    is_exclusive: bool


class RankShare(msgspec.Struct, frozen=True):
    """The share that one rank stores."""

    pieces: tuple[SharePiece, ...]  # exclusive ones first
    digest_groups: dict[str, tuple[int, ...]]  # indices in its layout, by the groups whose digests it takes part in
    partial_copies: tuple[str, ...] = ()  # nodes that each store again a part of the pieces that are not exclusive
    has_unshared_state: bool = False  # whether no other rank of several holds some of it


class _HeldBox(msgspec.Struct):
    """A box and the ranks that hold it, each with the index in its layout."""

    part: TensorPart
    ranks: list[int]
    indices: list[int]


class _ShareBuilder(msgspec.Struct):
    """A rank's share under construction."""

    pieces: list[SharePiece] = []
    partial_copies: set[str] = set()
    has_unshared_state: bool = False


def divide_state(
    layouts: Sequence[Layout],
    nodes: Sequence[str],
    replicas: int,
    preferred_nodes: Mapping[str, Sequence[str]] | None = None,
) -> list[RankShare]:
    """Return the shares of all ranks, each byte on ``replicas`` nodes; equal arguments give equal answers on every
    rank. ``layouts`` and ``nodes`` are by rank; ``preferred_nodes`` are by node, the first choice for second copies."""
    world = len(layouts)
    books = [_ShareBuilder() for _ in range(world)]
    groups: list[dict[str, list[int]]] = [defaultdict(list) for _ in range(world)]
    by_holders: dict[tuple[int, ...], list[_HeldBox]] = defaultdict(list)
    for held in _held_boxes(layouts):
        by_holders[tuple(held.ranks)].append(held)
    voting = [h for h, boxes in by_holders.items() if len(h) > 1 and any(held.part.is_digested for held in boxes)]
    for holders, name in _group_names(voting, world).items():
        for held in by_holders[holders]:
            if held.part.is_digested:
                for rank, index in zip(held.ranks, held.indices, strict=True):
                    groups[rank][name].append(index)
    for holders in sorted(by_holders):
        _divide_among(by_holders[holders], nodes, replicas, preferred_nodes or {}, books)
    return [
        RankShare(
            tuple(sorted(mine.pieces, key=_exclusive_first)),
            {name: tuple(indices) for name, indices in sorted(group.items())},
            tuple(sorted(mine.partial_copies)),
            mine.has_unshared_state,
        )
        for mine, group in zip(books, groups, strict=True)
    ]


def translate_share(share: RankShare, theirs: Layout, mine: Layout) -> RankShare | None:
    """Return another rank's share with its pieces as parts of the layout ``mine``.

    Args:
        share: The share of a rank whose layout is ``theirs``.
        theirs: That rank's layout.
        mine: The layout of a rank that may hold the same bytes.

    Returns:
        The share, without digests. None if ``mine`` lacks some of its bytes, or may hold others in their place.
    """
    parts: dict[str, list[tuple[int, Box]]] = {}
    for index, part in enumerate(mine.parts):
        if part.sharing is Sharing.EQUAL:
            parts.setdefault(part.name, []).append((index, part.box))
    pieces = []
    for piece in share.pieces:
        known = parts.get(theirs.parts[piece.part].name, ())
        number = next((index for index, box in known if _contains(box, piece.box)), None)
        if number is None:
            return None
        pieces.append(SharePiece(number, piece.box, piece.is_exclusive))
    return RankShare(tuple(pieces), {})


def _contains(outer: Box, inner: Box) -> bool:
    ranges = zip(outer.offset, outer.size, inner.offset, inner.size, strict=True)
    return all(start <= at and at + length <= start + size for start, size, at, length in ranges)


def unify_sharing(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts with each tensor's sharing as on the rank that knows most: a change is seen early by some."""
    most: dict[str, Sharing] = {}
    for layout in {id(layout): layout for layout in layouts}.values():
        for part in layout.parts:
            if part.sharing is not Sharing.EQUAL and most.get(part.name) is not Sharing.PER_RANK:
                most[part.name] = part.sharing
    made: dict[tuple[int, int], Layout] = {}
    shared = []
    for rank, layout in enumerate(layouts):
        other = {p.name: most[p.name] for p in layout.parts if most.get(p.name, p.sharing) != p.sharing}
        key = (id(layout), rank if Sharing.PER_RANK in other.values() else 0)  # equal layouts stay one object
        if other and key not in made:
            made[key] = Layout(tuple(_shared_as(p, other.get(p.name), rank, len(layouts)) for p in layout.parts))
        shared.append(made[key] if other else layout)
    return shared


def _shared_as(part: TensorPart, sharing: Sharing | None, rank: int, world: int) -> TensorPart:
    if sharing is None:
        return part
    shape, box = part.shape, part.box
    if sharing is Sharing.PER_RANK:
        shape, box = (world, *shape), Box((rank, *box.offset), (1, *box.size))
    return msgspec.structs.replace(part, shape=shape, box=box, sharing=sharing)


def _exclusive_first(piece: SharePiece) -> tuple[bool, SharePiece]:
    return not piece.is_exclusive, piece


def _group_names(holders: Iterable[tuple[int, ...]], world: int) -> dict[tuple[int, ...], str]:
    """Return a name for each set of holders, after its first rank, numbered if several have the same first rank."""
    names: dict[tuple[int, ...], str] = {}
    used: Counter[int] = Counter()
    for ranks in sorted(holders):
        used[ranks[0]] += len(ranks) != world
        again = f".{used[ranks[0]]}" if used[ranks[0]] > 1 else ""
        names[ranks] = "replicated" if len(ranks) == world else f"replicated-{ranks[0]}{again}"
    return names


def _held_boxes(layouts: Sequence[Layout]) -> Iterator[_HeldBox]:
    if len(layouts) > 1 and all(layout is layouts[0] for layout in layouts):
        everyone = list(range(len(layouts)))
        yield from (_HeldBox(p, everyone, [i] * len(layouts)) for i, p in enumerate(layouts[0].parts) if p.box.volume)
        return
    boxes: dict[tuple[str, Box], _HeldBox] = {}
    for rank, layout in enumerate(layouts):
        for index, part in enumerate(layout.parts):
            if part.box.volume:
                held = boxes.setdefault((part.name, part.box), _HeldBox(part, [], []))
                held.ranks.append(rank)
                held.indices.append(index)
    yield from boxes.values()


def _divide_among(
    boxes: list[_HeldBox],
    nodes: Sequence[str],
    replicas: int,
    preferred_nodes: Mapping[str, Sequence[str]],
    builders: list[_ShareBuilder],
) -> None:
    """Assign every piece of ``boxes``, with the same holders, to the least loaded ones, different nodes first."""
    holders = boxes[0].ranks
    if len(holders) == 1 < len(nodes):
        shared = (held.part for held in boxes if held.part.sharing is not Sharing.PER_RANK)
        builders[holders[0]].has_unshared_state = any(part.nbytes > SCALAR_BYTES for part in shared)

    def nodes_of(ranks: Sequence[int]) -> int:
        return len({nodes[rank] for rank in ranks})

    alone = nodes_of(range(len(nodes))) == 1
    copies = 1 if alone else min(replicas, nodes_of(holders))
    total = sum(held.part.nbytes for held in boxes)
    largest = max(MIN_CUT_BYTES, total * copies // (len(holders) * len(holders) * CUTS_PER_HOLDER) + 1)
    load = dict.fromkeys(holders, 0)
    units = [(held, box) for held in boxes for box in _units(held, largest, len(holders))]
    units.sort(key=lambda unit: -unit[1].volume * unit[0].part.itemsize)
    for held, box in units:
        if held.part.sharing is Sharing.FIRST_RANK:
            chosen = holders[:1]
        elif held.part.nbytes <= SCALAR_BYTES:
            chosen = holders
        else:
            chosen = _least_loaded(load, nodes, copies, preferred_nodes)
        exclusive = not alone and nodes_of(chosen) < replicas
        for rank in chosen:
            load[rank] += box.volume * held.part.itemsize
            builders[rank].pieces.append(SharePiece(held.indices[holders.index(rank)], box, exclusive))
            if not exclusive and held.part.nbytes > SCALAR_BYTES:
                builders[rank].partial_copies.update({nodes[other] for other in chosen} - {nodes[rank]})


def _units(held_box: _HeldBox, largest: int, holders: int) -> Iterator[Box]:
    """Yield the box, cut along its first dimension to about ``largest`` bytes if there is a choice of holder."""
    box, nbytes = held_box.part.box, held_box.part.nbytes
    if holders == 1 or nbytes <= largest or not box.size or held_box.part.sharing is Sharing.FIRST_RANK:
        yield box
        return
    rows = box.size[0]
    step = max(1, rows * largest // nbytes)
    for start in range(0, rows, step):
        size = min(step, rows - start)
        yield Box((box.offset[0] + start, *box.offset[1:]), (size, *box.size[1:]))


def _least_loaded(
    load: dict[int, int], nodes: Sequence[str], copies: int, preferred_nodes: Mapping[str, Sequence[str]]
) -> list[int]:
    first = min(load, key=lambda r: (load[r], r))
    chosen, used, far = [first], {nodes[first]}, preferred_nodes.get(nodes[first], ())
    for _ in range(copies - 1):
        rest = (r for r in load if r not in chosen)
        rank = min(rest, key=lambda r: (nodes[r] in used, nodes[r] not in far, load[r], r))
        chosen.append(rank)
        used.add(nodes[rank])
    return chosen


def build_manifest(
    rank: int, layouts: Sequence[Layout], share: RankShare, blob_capacity: int, *, digests: bool = False
) -> Manifest:
    """Return a share's slot layout: exclusive pieces, Python state (with ``blob_capacity`` bytes), pieces of others.

    ``digests``: with room for the digests of the pieces, behind the Python state.
    """
    catalog, index_of = _catalog(layouts)
    stored: list[StoredBox] = []

    def place(pieces: Iterable[SharePiece], at: int) -> int:
        for piece in pieces:
            part = layouts[rank].parts[piece.part]
            stored.append(StoredBox(index_of[part.name], piece.box, at))
            at = aligned(at + piece.box.volume * part.itemsize)
        return at

    blob_at = place((piece for piece in share.pieces if piece.is_exclusive), 0)
    digests_at = aligned(blob_at + BLOB_LENGTH_BYTES + blob_capacity)
    at = digests_at + (_digest_bytes(share) if digests else 0)
    exclusive_end = at if stored else 0
    end = place((piece for piece in share.pieces if not piece.is_exclusive), at)
    return Manifest(
        LAYOUT_FORMAT,
        rank,
        len(layouts),
        catalog,
        tuple(stored),
        blob_at,
        blob_capacity,
        end,
        exclusive_end,
        digests_at if digests else 0,
    )


def _digest_bytes(share: RankShare) -> int:
    return aligned(PIECE_DIGEST_BYTES * (1 + len(share.pieces)))


def payload_bytes(layout: Layout, share: RankShare, blob_capacity: int, *, digests: bool = False) -> int:
    """Return the payload size of the manifest that ``build_manifest`` would make of that share."""
    pieces = (aligned(piece.box.volume * layout.parts[piece.part].itemsize) for piece in share.pieces)
    return sum(pieces) + aligned(BLOB_LENGTH_BYTES + blob_capacity) + (_digest_bytes(share) if digests else 0)


def _catalog(layouts: Sequence[Layout]) -> tuple[tuple[TensorInfo, ...], dict[str, int]]:
    seen: dict[str, TensorInfo] = {}
    having: dict[str, list[int]] = defaultdict(list)
    distinct = {id(layout): layout for layout in layouts}
    for layout in distinct.values():
        for part in layout.parts:
            own = part.sharing is Sharing.PER_RANK
            if own:
                having[part.name].append(part.box.offset[0])
            kind = (part.dtype, part.itemsize, part.shape, own)
            tensor = TensorInfo(part.name, *kind, part.aliases, part.groups, placement=part.location)
            other = seen.setdefault(part.name, tensor)
            if other == tensor:
                continue
            seen[part.name] = msgspec.structs.replace(
                other,
                aliases=tuple(dict.fromkeys(other.aliases + tensor.aliases)),
                groups=tuple(dict.fromkeys(other.groups + tensor.groups)),
            )
            if (other.dtype, other.shape, other.per_rank) != (tensor.dtype, tensor.shape, tensor.per_rank):
                raise ValueError(
                    f"ranks disagree about {part.name}: {other.dtype} {other.shape} on one, "
                    f"{tensor.dtype} {tensor.shape} on another; tensors of one name must be parts of one tensor"
                )
    for name, ranks in having.items():
        if len(ranks) < len(layouts):
            seen[name] = msgspec.structs.replace(seen[name], ranks=tuple(ranks))
    return tuple(seen.values()), {name: index for index, name in enumerate(seen)}


# ---- memory that a node's vault will be asked for: slots of its ranks, and copies of others'. Parity is not included:
# the controller chooses its nodes later.


def segment_needs(
    node: str, spec: GenerationSpec, shares: Sequence[RankShare], slots: int, slot_bytes: Callable[[int], int]
) -> Iterator[SegmentRequirement]:
    """Yield the segments of ranks on ``node`` and of its vault, without slots for pinned versions."""
    pinned = spec.spec.pinned_slots

    def need(rank: int, number: int, replica: bool) -> SegmentRequirement:
        each = -(-slot_bytes(rank) // PAGE_BYTES) * PAGE_BYTES
        return SegmentRequirement(replica=replica, number=number, slot_bytes=each, slots=slots, pinned_slots=pinned)

    for member in spec.members_on(node):
        yield need(member.rank, member.local_rank, False)
    for sender in spec.seats:
        if node in spec.replica_nodes.get(sender, ()) and sender != node:
            for rank in spec.ranks_on(sender):
                if any(piece.is_exclusive for piece in shares[rank].pieces):
                    yield need(rank, rank, True)
