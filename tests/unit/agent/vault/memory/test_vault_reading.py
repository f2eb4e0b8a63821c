"""Ranges of a slot for whoever asks: over the wire, from this node, and never wrong bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from everstep.errors import DigestMismatch, MalformedMessage, NotFound, Unavailable
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder
from tests.support.borrowing import borrowed, rank_of, read
from tests.support.forked import ForkPool
from tests.support.lying_vault import LyingVault
from tests.support.vaults import JOB, RankMemory, Vaults, noise, two_vaults

V = Version(1, 1)
SIZE = 3 * CHUNK_BYTES + 1000
PAYLOAD = noise(SIZE)


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with two_vaults(program_forks) as running:
        yield running


@pytest.fixture
def owner(fleet: Vaults) -> RankMemory:
    """Rank 3 on n2, with one sealed slot of a few chunks."""
    rank = RankMemory(fleet.all[1].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    rank.fill(0, V, PAYLOAD)
    return rank


def scratch(fleet: Vaults, node: int = 0) -> Path:
    return fleet.all[node].segment_dir / "scratch-of-rank"


def bring(
    fleet: Vaults,
    ranges: tuple[tuple[int, int], ...],
    by: int = 0,
    node: str = "n2",
    rank: int = 3,
    version: Version = V,
    unhashed: bool = False,
) -> bytes:
    """The bytes as a rank gets them, over a connection that its vault lends. Raises what is refused."""
    with rank_of(fleet.all[by]) as client, closing(borrowed(client, node)) as channel:
        return read(channel, rank, version, ranges, unhashed)


def fetch(fleet: Vaults, ranges: tuple[tuple[int, int], ...], by: int = 0, **fields: object) -> local.FromVault:
    said = {"job": JOB, "node": "n2", "rank": 3, "version": V, "ranges": ranges, "target_path": str(scratch(fleet, by))}
    return fleet.all[by].client().ask(local.Fetch, **(said | fields))


RANGES = (
    ((0, SIZE),),
    ((5, 10), (0, 5), (CHUNK_BYTES - 3, 6), (SIZE - 1, 1), (7, 0)),
    ((2 * CHUNK_BYTES, CHUNK_BYTES), (0, CHUNK_BYTES), (100, 2 * CHUNK_BYTES)),
    ((SIZE - 9, 9), (0, SIZE - 9)),
    tuple((at, 3) for at in range(0, 30_000, 10)),
    ((0, 0),),
)


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_ranges_arrive_in_the_requested_order(fleet: Vaults, owner: RankMemory, by: int) -> None:
    for ranges in RANGES:
        expected = b"".join(PAYLOAD[at : at + count] for at, count in ranges)
        for unhashed in (False, True):
            assert bring(fleet, ranges, by, unhashed=unhashed) == expected, ranges[:5]


def test_manifest_lands_at_the_requested_offset_only(fleet: Vaults, owner: RankMemory) -> None:
    answer = fetch(fleet, (), target_offset=4097)
    assert isinstance(answer, local.Fetched), answer
    landed = scratch(fleet).read_bytes()
    assert landed[4097 : 4097 + answer.bytes] == b"what is where"
    assert not landed[:4097].strip(b"\0")


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_fetch_of_existing_slot_ranges_is_refused(fleet: Vaults, owner: RankMemory, by: int) -> None:
    refused = fetch(fleet, ((0, 9),), by)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "malformed"
    assert "read rank 3's version 1:1 over a connection to n2" in refused.message
    assert not scratch(fleet, by).exists()


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_without_ranges_the_manifest_lands(fleet: Vaults, owner: RankMemory, by: int) -> None:
    assert fetch(fleet, (), by).bytes == len(b"what is where")
    assert scratch(fleet, by).read_bytes() == b"what is where"


def test_wrong_manifest_is_refused_and_its_sender_reported(fleet: Vaults) -> None:
    with closing(LyingVault(PAYLOAD, manifest=b"n")) as liar:
        holders = (Holder(node="n1", vault=fleet.all[0].address), Holder(node="n2", vault=liar.address))
        fleet.configure(fleet.all[0], generation=2, holders=holders)
        refused = fetch(fleet, ())
        assert isinstance(refused, local.RequestFailed)
        assert refused.code == "digest_mismatch"
        found = fleet.supervisors["n1"].finding().finding.finding
        assert (found.kind, found.subject) == (FindingKind.TRANSFER_CORRUPT, "n2")
        assert not scratch(fleet).exists()


def test_a_copy_serves_as_well_as_the_original(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.sealed(0, V, ["n1"]).nodes == ("n1",)
    fleet.all[1].kill()
    assert bring(fleet, ((10, 100),), node="n1") == PAYLOAD[10:110]


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_missing_slot_is_not_found(fleet: Vaults, owner: RankMemory, by: int) -> None:
    with pytest.raises(NotFound):
        bring(fleet, ((0, 1),), by, version=Version(1, 2))
    with pytest.raises(NotFound):
        bring(fleet, ((0, 1),), by, rank=4)
    owner.view.begin(0, 3, Version(1, 5), b"", 10)
    with pytest.raises(NotFound):
        bring(fleet, ((0, 1),), by)


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_ranges_outside_the_payload_are_refused(fleet: Vaults, owner: RankMemory, by: int) -> None:
    for bad in ((SIZE, 1), (0, SIZE + 1), (-1, 2), (1, -1), (1 << 61, 1 << 61)):
        for unhashed in (False, True):
            with pytest.raises(MalformedMessage):
                bring(fleet, ((0, 4), bad), by, unhashed=unhashed)
    assert bring(fleet, ((0, 4),), by) == PAYLOAD[:4]


@pytest.mark.promise("restored-is-whole")
@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_corrupt_chunk_is_never_served_and_its_slot_discarded(fleet: Vaults, owner: RankMemory, by: int) -> None:
    owner.view.payload(0)[2 * CHUNK_BYTES + 1] ^= 128
    assert bring(fleet, ((0, CHUNK_BYTES),), by) == PAYLOAD[:CHUNK_BYTES]
    with pytest.raises(DigestMismatch):
        bring(fleet, ((0, 3 * CHUNK_BYTES),), by)
    found = fleet.supervisors["n2"].finding().finding.finding
    assert (found.kind, found.subject) == (FindingKind.SLOT_CORRUPT, "job/rank3/1:1")
    assert "chunk 2" in found.message
    assert owner.view.header(0) is None
    with pytest.raises(NotFound):
        bring(fleet, ((0, CHUNK_BYTES),), by)


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_corrupt_chunk_of_an_unhashed_read_is_found_on_recheck(fleet: Vaults, owner: RankMemory, by: int) -> None:
    whole = ((CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 1000))
    owner.view.payload(0)[2 * CHUNK_BYTES + 1] ^= 128
    with pytest.raises(AssertionError):  # the digest beside it is the one that was sealed
        bring(fleet, whole, by, unhashed=True)
    assert owner.view.header(0) is not None
    with pytest.raises(DigestMismatch):
        bring(fleet, whole, by)
    found = fleet.supervisors["n2"].finding().finding.finding
    assert (found.kind, found.subject) == (FindingKind.SLOT_CORRUPT, "job/rank3/1:1")
    assert owner.view.header(0) is None


@pytest.mark.parametrize("piece", [(2 * CHUNK_BYTES, 100), (2 * CHUNK_BYTES + 5, CHUNK_BYTES - 5)])
def test_partial_chunk_is_hashed_even_for_unhashed_reads(
    fleet: Vaults, owner: RankMemory, piece: tuple[int, int]
) -> None:
    owner.view.payload(0)[2 * CHUNK_BYTES + 1] ^= 128
    with pytest.raises(DigestMismatch):
        bring(fleet, ((0, CHUNK_BYTES), piece), unhashed=True)
    assert owner.view.header(0) is None


def test_corrupt_slot_is_skipped_for_a_copy_on_the_same_node(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.sealed(0, V, ["n1"]).nodes == ("n1",)
    twin = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    twin.fill(0, V, PAYLOAD)
    twin.view.payload(0)[0] ^= 1
    assert bring(fleet, ((0, 100),), node="n1") == PAYLOAD[:100]
    assert twin.view.header(0) is None


def test_slot_found_corrupt_while_sending_continues_from_copy(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.sealed(0, V, ["n1"]).nodes == ("n1",)
    twin = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    twin.fill(0, V, PAYLOAD)
    twin.view.payload(0)[2 * CHUNK_BYTES + 5] ^= 1
    assert bring(fleet, ((3, SIZE - 3),), by=1, node="n1") == PAYLOAD[3:]
    assert twin.view.header(0) is None
    assert fleet.supervisors["n1"].finding().finding.finding.kind is FindingKind.SLOT_CORRUPT


def test_different_slot_never_continues_a_corrupt_transfer(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.sealed(0, V, ["n1"]).nodes == ("n1",)
    other = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    other.fill(0, V, noise(SIZE, seed=2))
    other.view.payload(0)[2 * CHUNK_BYTES + 5] ^= 1
    with pytest.raises(DigestMismatch):
        bring(fleet, ((0, SIZE),), by=1, node="n1")


LANDINGS = pytest.mark.parametrize("by", [0, 1], ids=["another node's manifest", "this node's"])


@LANDINGS
def test_fetch_lands_only_in_plain_files_below_segment_dir(fleet: Vaults, owner: RankMemory, by: int) -> None:
    home = fleet.all[by].segment_dir
    outside = fleet.base / "precious"
    outside.write_bytes(b"untouched")
    (home / "link").symlink_to(outside)
    (home / "folder").symlink_to(fleet.base)
    os.mkfifo(home / "pipe")
    RankMemory(fleet.all[0].client(), rank=0)
    for into in (
        str(outside),
        "/etc/passwd",
        f"{home}/../precious",
        f"{home}/link",
        f"{home}/folder/precious",
        f"{home}/pipe",
        str(home),
        f"{home}/{JOB}",
        f"{home}/{JOB}/own-0",
        f"{home}/.vault.lock",
        "precious",
        "",
    ):
        refused = fetch(fleet, (), by, target_path=into)
        assert isinstance(refused, local.RequestFailed), into
        assert refused.code == "forbidden", into
    assert outside.read_bytes() == b"untouched"
    assert fetch(fleet, (), by, target_offset=-1).code == "forbidden"


@LANDINGS
def test_fetch_without_room_is_refused_with_the_arithmetic(fleet: Vaults, owner: RankMemory, by: int) -> None:
    refused = fetch(fleet, (), by, target_offset=1 << 50)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "slot_memory"
    assert "free" in refused.message


def test_unresponsive_node_is_unavailable(fleet: Vaults, owner: RankMemory) -> None:
    fleet.all[1].kill()
    assert fetch(fleet, ()).code == "unavailable"
    assert fetch(fleet, (), node="n7").code == "not_found"
    with pytest.raises(Unavailable):
        bring(fleet, ((0, 9),))
    with pytest.raises(NotFound):
        bring(fleet, ((0, 9),), node="n7")


def test_inventory_lists_all_nodes_except_unresponsive_ones(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.sealed(0, V, ["n1"]).nodes == ("n1",)
    client = fleet.all[0].client()
    answer = client.ask(local.Inventory, job=JOB, nodes=("n1", "n2", "n9"))
    assert [(s.node, s.rank, s.replica) for s in answer.slots] == [("n1", 3, True), ("n2", 3, False)]
    assert len({s.manifest_digest for s in answer.slots}) == 1
    fleet.all[1].stop()
    answer = client.ask(local.Inventory, job=JOB, nodes=("n2",), timeout_s=0.2)
    assert [s.node for s in answer.slots] == ["n1"]
