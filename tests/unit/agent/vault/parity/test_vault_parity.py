"""Parity over real sockets between real vaults: made of four shards on four nodes, kept on two, and read back."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import msgspec
import pytest
from everstep_agent.vault.parity.shards import STRIPE_BYTES, parity_bytes

from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES
from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder
from tests.support.forked import ForkPool
from tests.support.lying_vault import LyingVault
from tests.support.parity_group import GROUP, NODES, SIZES, Group, V, started
from tests.support.vaults import JOB, Vaults, map_segment, noise


@pytest.fixture(scope="module")
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    """For tests that leave its processes as they found them."""
    with started(program_forks) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_stays(fleet: Vaults) -> Iterator[None]:
    yield
    for vault in fleet.all:
        assert isinstance(vault.client().ask(local.ForgetJob, job=JOB), local.RequestDone)


@pytest.fixture
def group(fleet: Vaults) -> Group:
    return Group(fleet)


def counter(group: Group, node: str, name: str) -> int:
    answer = group.fleet.supervisors[node].ask(local.Statistics)
    assert isinstance(answer, local.StatisticsAnswer)
    return answer.counters[name]


@pytest.mark.parametrize("gone", [("n1", "n2"), pytest.param(("n3", "p"), marks=pytest.mark.nightly)], ids=" and ".join)
def test_two_nodes_are_killed_and_every_shard_is_read_back(program_forks: ForkPool, gone: tuple[str, str]) -> None:
    with started(program_forks) as fleet:
        group = Group(fleet)
        group.protected()
        for vault in fleet.all:
            if vault.node in gone:
                vault.kill()
        for node in gone:
            if node.startswith("n"):
                group.reads_back(int(node[1:]) - 1, "q")


def test_shards_are_read_back_without_any_two_of_six_nodes(fleet: Vaults) -> None:
    group = Group(fleet, sizes=(STRIPE_BYTES + 100, 300_000, 4096, 1))
    group.protected()
    for generation, gone in enumerate(combinations(NODES, 2), start=2):
        group.forget_nodes(gone, generation)
        reader = next(node for node in NODES if node not in gone)
        for node in gone:
            if node.startswith("n"):
                group.reads_back(int(node[1:]) - 1, reader)


def test_decoded_ranges_land_in_the_requested_order(group: Group) -> None:
    group.protected()
    size = len(group.payloads[1])
    source = random.Random(4)
    scattered = [(at, source.randint(0, size - at)) for at in (source.randint(0, size) for _ in range(20))]
    ranges = ((CHUNK_BYTES - 5, 10), (0, 0), (size - 1, 1), (0, 3), *scattered)
    group.forget_nodes(("n2", "p"), 2)
    expected = b"".join(group.payloads[1][at : at + count] for at, count in ranges)
    before = counter(group, "n1", "parity_recovered_bytes")
    assert group.made_again(1, "n1", ranges) == expected
    assert counter(group, "n1", "parity_recovered_bytes") - before == len(expected)
    answer = group.fetch(1, "n1", ((size, 1),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "malformed"


def test_parity_has_the_longest_member_size_and_is_made_once(group: Group) -> None:
    before = [counter(group, "p", name) for name in ("parity_slots", "parity_bytes")]
    group.protected()
    group.protected()
    after = [counter(group, "p", name) for name in ("parity_slots", "parity_bytes")]
    assert [one - other for one, other in zip(after, before, strict=True)] == [1, parity_bytes(max(SIZES))]


def test_third_loss_is_refused_with_names_and_reasons(group: Group) -> None:
    group.protected()
    group.forget_nodes(("n1", "n2", "p"), 2)
    answer = group.fetch(0, "n3", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_restorable"
    assert "1 other members and 1 of P and Q are lost too" in answer.message
    assert "n2 is unavailable (n2 is not among the holders" in answer.message


def test_missing_parity_recovers_no_shard(group: Group) -> None:
    answer = group.fetch(0, "n3", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_restorable"
    assert "no sealed slot on this node holds version 1:5 of the parity of group 7" in answer.message


def test_vault_without_parity_does_not_import_numpy() -> None:
    code = "import sys, everstep_agent.vault.process; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- who does not hold what was sealed ---------------------------------------------------------------------------


def test_parity_is_not_made_of_corrupt_shards(group: Group) -> None:
    member = group.ranks[3]
    view = map_segment(member.path)
    payload = view.payload(0)
    payload[4_000_000] ^= 1
    answer = group.protect("p")
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "digest_mismatch"
    payload[4_000_000] ^= 1
    member.fill(0, V, group.payloads[3], manifest=b"what rank 13 has")
    group.protected()
    group.forget_nodes(("n1", "n2"), 2)
    group.reads_back(0, "q")


def test_member_sending_wrong_bytes_is_detected_and_named(group: Group) -> None:
    liar = LyingVault(group.payloads[1])
    try:
        group.fleet.configure(
            generation=2,
            holders=(*(h for h in group.fleet.holders() if h.node != "n2"), Holder(node="n2", vault=liar.address)),
        )
        answer = group.protect("p", generation=2)
        assert isinstance(answer, local.RequestFailed)
        assert answer.code == "digest_mismatch"
        assert "rank 11's version 1:5 on n2: chunk 0 differs from the sealed bytes" in answer.message
        finding = group.fleet.supervisors["p"].finding().finding.finding
        assert (finding.kind, finding.subject) == (FindingKind.TRANSFER_CORRUPT, "n2")
        view = map_segment(group.fleet.all[NODES.index("p")].segment_dir / JOB / "parity-7")
        assert list(view.sealed_slots()) == []
    finally:
        liar.close()


def test_survivor_with_different_bytes_counts_as_lost(group: Group) -> None:
    group.protected()
    liar = group.ranks[1]
    other = bytearray(group.payloads[1])
    other[77] ^= 1
    liar.fill(0, V, bytes(other), manifest=b"what rank 11 has")
    group.forget_nodes(("n1",), 2)
    group.reads_back(0, "q")
    finding = group.fleet.supervisors["q"].finding().finding.finding
    assert finding.kind is FindingKind.TRANSFER_CORRUPT
    assert finding.subject == "n2"
    group.forget_nodes(("n1", "p"), 3)
    answer = group.fetch(0, "q", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_restorable"
    assert "chunk 0 differs from the sealed bytes" in answer.message


def test_corrupt_parity_is_skipped_where_the_other_suffices(group: Group) -> None:
    group.protected()
    home = group.fleet.all[NODES.index("p")]
    view = map_segment(home.segment_dir / JOB / "parity-7")
    ((slot, _),) = view.sealed_slots()
    view.payload(slot)[123_456] ^= 8
    group.forget_nodes(("n1",), 2)
    group.reads_back(0, "n2")
    finding = group.fleet.supervisors["p"].finding().finding.finding
    assert finding.kind is FindingKind.SLOT_CORRUPT
    assert finding.subject == "job/parity-7/1:5"


def test_wrongly_made_parity_is_detected_by_its_result(group: Group) -> None:
    """Its own digests are right; what is made from it is not what the lost rank sealed."""
    group.protected()
    view = map_segment(group.fleet.all[NODES.index("p")].segment_dir / JOB / "parity-7")
    ((slot, header),) = view.sealed_slots()
    manifest, wrong = view.manifest(slot), bytearray(view.payload(slot))
    wrong[3] ^= 1
    view.begin(slot, header.rank, V, manifest, len(wrong))[:] = wrong
    view.seal(slot)
    group.forget_nodes(("n1",), 2)
    group.reads_back(0, "n4")
    group.forget_nodes(("n1", "n2"), 3)
    answer = group.fetch(0, "n4", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "digest_mismatch"


def test_p_and_q_of_different_shards_are_not_used_together(group: Group) -> None:
    first = group.protect("p")
    group.payloads[2] = noise(4999, seed=9)
    group.fill(V)
    second = group.protect("q")
    assert isinstance(first, local.Protected)
    assert isinstance(second, local.Protected)
    assert first.members_digest != second.members_digest
    group.forget_nodes(("n1",), 2)
    answer = group.fetch(0, "n4", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert (answer.code, answer.message) == (
        "digest_mismatch",
        "P and Q of the group of rank 10's version 1:5 were made of different shards",
    )


# --- homes -------------------------------------------------------------------------------------------------------


def test_parity_is_distinct_from_rank_slots(group: Group) -> None:
    """Rank 7's slot and the parity of group 7 are both number 7 of that version."""
    group.protected()
    home = group.fleet.all[NODES.index("p")]
    inventory = group.fleet.supervisors["p"].ask(local.Inventory, job=JOB)
    assert isinstance(inventory, local.InventoryAnswer)
    assert inventory.slots == ()
    said = {"job": JOB, "rank": 7, "version": V, "ranges": (), "target_path": str(home.segment_dir / "scratch")}
    answer = home.client().ask(local.Fetch, node="p", **said)
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_found"


def test_restarted_vault_adopts_its_parity(group: Group) -> None:
    group.protected()
    home = group.fleet.all[NODES.index("q")]
    home.kill()
    home.start()
    group.fleet.configure(generation=2)
    group.forget_nodes(("n1", "n4"), 3)
    group.reads_back(3, "q")


def test_next_parity_reuses_the_slot_outside_kept_versions(group: Group) -> None:
    group.protected()
    for slot, version in enumerate((Version(1, 6), Version(1, 7)), start=1):
        group.fill(version, slot)
        for home in ("p", "q"):
            answer = group.protect(home, version, keep=(V,))
            assert isinstance(answer, local.Protected), answer
    group.forget_nodes(("n1", "n2"), 2)
    group.reads_back(0, "q")
    assert isinstance(group.fetch(0, "q", ((0, 10),), Version(1, 7)), local.Fetched)
    assert isinstance(group.fetch(0, "q", ((0, 10),), Version(1, 6)), local.RequestFailed)


def test_parity_refuses_foreign_node_and_duplicate_member(group: Group) -> None:
    answer = group.protect("n1")
    assert isinstance(answer, local.RequestFailed)
    assert (answer.code, answer.message) == ("not_found", "n1 does not store the parity of group 7")
    doubled = msgspec.structs.replace(GROUP, parity=("p", "n1"))
    answer = group.protect("p", group=doubled)
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "configuration"
    assert "names a node twice (n1, n2, n3, n4, p, n1)" in answer.message


def test_stale_generation_and_missing_version_are_refused(group: Group) -> None:
    answer = group.protect("p", Version(1, 99))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_found"
    group.fleet.configure(generation=2)
    answer = group.protect("p")
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "stale"


def test_forgotten_job_leaves_no_parity(group: Group) -> None:
    group.protected()
    home = group.fleet.all[NODES.index("p")]
    assert isinstance(group.fleet.supervisors["p"].ask(local.ForgetJob, job=JOB), local.RequestDone)
    assert list(home.segment_dir.rglob("parity-*")) == []
