"""Reads of slot ranges, over the network or from the same node, which never return corrupt bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from everstep.errors import DigestMismatch, NotFound, Unavailable
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.peer_reads import peer_connection, rank_client, read
from tests.support.vaults.vault_process import JOB, RankMemory, Vaults, expect, noise, two_vaults

V = Version(1, 1)
SIZE = 3 * CHUNK_BYTES + 1000
PAYLOAD = noise(SIZE)


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with two_vaults(program_forks) as running:
        yield running


@pytest.fixture
def owner(fleet: Vaults) -> RankMemory:
    """Return rank 3 on n2, with a sealed slot of several chunks."""
    rank = RankMemory(fleet.all[1].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    rank.fill(0, V, PAYLOAD)
    return rank


def scratch(fleet: Vaults, node: int = 0) -> Path:
    return fleet.all[node].segment_dir / "scratch-of-rank"


def receive(
    fleet: Vaults,
    ranges: tuple[tuple[int, int], ...],
    by: int = 0,
    node: str = "n2",
    rank: int = 3,
    version: Version = V,
    unhashed: bool = False,
) -> bytes:
    """Receive bytes as a rank does, over a connection of its vault; raise the error of a refusal."""
    with rank_client(fleet.all[by]) as client, closing(peer_connection(client, node)) as channel:
        return read(channel, rank, version, ranges, unhashed)


def fetch(fleet: Vaults, ranges: tuple[tuple[int, int], ...], by: int = 0, **fields: object) -> local.FromVault:
    defaults = {
        "job": JOB,
        "node": "n2",
        "rank": 3,
        "version": V,
        "ranges": ranges,
        "target_path": str(scratch(fleet, by)),
    }
    return fleet.all[by].client().ask(local.Fetch, **(defaults | fields))


def failed_fetch(fleet: Vaults, by: int = 0, **fields: object) -> local.RequestFailed:
    """Fetch a manifest that the vault refuses."""
    return expect(fetch(fleet, (), by, **fields), local.RequestFailed)


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
            assert receive(fleet, ranges, by, unhashed=unhashed) == expected, ranges[:5]


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_fetch_of_existing_slot_ranges_is_refused(fleet: Vaults, owner: RankMemory, by: int) -> None:
    refused = fetch(fleet, ((0, 9),), by)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "malformed"
    assert "read rank 3's version 1:1 over a connection to n2" in refused.message
    assert not scratch(fleet, by).exists()


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_missing_slot_is_not_found(fleet: Vaults, owner: RankMemory, by: int) -> None:
    with pytest.raises(NotFound):
        receive(fleet, ((0, 1),), by, version=Version(1, 2))
    with pytest.raises(NotFound):
        receive(fleet, ((0, 1),), by, rank=4)
    owner.view.begin(0, 3, Version(1, 5), b"", 10)
    with pytest.raises(NotFound):
        receive(fleet, ((0, 1),), by)


@pytest.mark.promise("restored-is-whole")
@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_corrupt_chunk_is_never_served_and_its_slot_discarded(fleet: Vaults, owner: RankMemory, by: int) -> None:
    owner.view.payload(0)[2 * CHUNK_BYTES + 1] ^= 128
    assert receive(fleet, ((0, CHUNK_BYTES),), by) == PAYLOAD[:CHUNK_BYTES]
    with pytest.raises(DigestMismatch):
        receive(fleet, ((0, 3 * CHUNK_BYTES),), by)
    found = fleet.supervisors["n2"].finding().finding.finding
    assert (found.kind, found.subject) == (FindingKind.SLOT_CORRUPT, "job/rank3/1:1")
    assert "chunk 2" in found.message
    assert owner.view.header(0) is None
    with pytest.raises(NotFound):
        receive(fleet, ((0, CHUNK_BYTES),), by)


@pytest.mark.parametrize("by", [0, 1], ids=["from another node", "from this node"])
def test_corrupt_chunk_of_an_unhashed_read_is_found_on_recheck(fleet: Vaults, owner: RankMemory, by: int) -> None:
    whole = ((CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 1000))
    owner.view.payload(0)[2 * CHUNK_BYTES + 1] ^= 128
    with pytest.raises(AssertionError):  # the digest beside the chunk is the sealed one
        receive(fleet, whole, by, unhashed=True)
    assert owner.view.header(0) is not None
    with pytest.raises(DigestMismatch):
        receive(fleet, whole, by)
    found = fleet.supervisors["n2"].finding().finding.finding
    assert (found.kind, found.subject) == (FindingKind.SLOT_CORRUPT, "job/rank3/1:1")
    assert owner.view.header(0) is None


def test_corrupt_slot_is_skipped_for_a_copy_on_the_same_node(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.replicated(0, V, ["n1"]).nodes == ("n1",)
    twin = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    twin.fill(0, V, PAYLOAD)
    twin.view.payload(0)[0] ^= 1
    assert receive(fleet, ((0, 100),), node="n1") == PAYLOAD[:100]
    assert twin.view.header(0) is None


def test_slot_found_corrupt_while_sending_continues_from_copy(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.replicated(0, V, ["n1"]).nodes == ("n1",)
    twin = RankMemory(fleet.all[0].client(), rank=3, slot_bytes=slot_bytes_for(64, SIZE))
    twin.fill(0, V, PAYLOAD)
    twin.view.payload(0)[2 * CHUNK_BYTES + 5] ^= 1
    assert receive(fleet, ((3, SIZE - 3),), by=1, node="n1") == PAYLOAD[3:]
    assert twin.view.header(0) is None
    assert fleet.supervisors["n1"].finding().finding.finding.kind is FindingKind.SLOT_CORRUPT


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
        assert failed_fetch(fleet, by, target_path=into).code == "forbidden", into
    assert outside.read_bytes() == b"untouched"
    assert failed_fetch(fleet, by, target_offset=-1).code == "forbidden"


@LANDINGS
def test_fetch_without_room_is_refused_with_the_arithmetic(fleet: Vaults, owner: RankMemory, by: int) -> None:
    refused = failed_fetch(fleet, by, target_offset=1 << 50)
    assert refused.code == "slot_memory"
    assert "free" in refused.message


def test_unresponsive_node_is_unavailable(fleet: Vaults, owner: RankMemory) -> None:
    fleet.all[1].kill()
    assert failed_fetch(fleet).code == "unavailable"
    assert failed_fetch(fleet, node="n7").code == "not_found"
    with pytest.raises(Unavailable):
        receive(fleet, ((0, 9),))
    with pytest.raises(NotFound):
        receive(fleet, ((0, 9),), node="n7")


def test_inventory_lists_all_nodes_except_unresponsive_ones(fleet: Vaults, owner: RankMemory) -> None:
    assert owner.replicated(0, V, ["n1"]).nodes == ("n1",)
    client = fleet.all[0].client()
    answer = client.inventory(nodes=("n1", "n2", "n9"))
    assert [(s.node, s.rank, s.replica) for s in answer.slots] == [("n1", 3, True), ("n2", 3, False)]
    assert len({s.manifest_digest for s in answer.slots}) == 1
    fleet.all[1].stop()
    answer = client.inventory(nodes=("n2",), timeout_s=0.2)
    assert [s.node for s in answer.slots] == ["n1"]
