"""Parity of four shards between real vaults, over real sockets: made, kept on two nodes, and read back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import pytest

from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder
from everstep_agent.vault.parity.shards import STRIPE_BYTES, parity_bytes
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.corrupting_vault import CorruptingVault
from tests.support.vaults.vault_process import JOB, Vaults, map_segment
from tests.unit.agent.vault.parity.parity_group import NODES, SIZES, Group, V, started


@pytest.fixture(scope="module")
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    """The vaults of a group, for tests that leave the processes as they were."""
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
    return group.fleet.supervisors[node].statistics().counters[name]


@pytest.mark.parametrize("gone", [("n1", "n2"), pytest.param(("n3", "p"), marks=pytest.mark.nightly)], ids=" and ".join)
def test_two_nodes_are_killed_and_every_shard_is_read_back(program_forks: ForkPool, gone: tuple[str, str]) -> None:
    with started(program_forks) as fleet:
        group = Group(fleet)
        group.protect_all()
        for vault in fleet.all:
            if vault.node in gone:
                vault.kill()
        for node in gone:
            if node.startswith("n"):
                group.check_rebuilt(int(node[1:]) - 1, "q")


def test_shards_are_read_back_without_any_two_of_six_nodes(fleet: Vaults) -> None:
    group = Group(fleet, sizes=(STRIPE_BYTES + 100, 300_000, 4096, 1))
    group.protect_all()
    for generation, gone in enumerate(combinations(NODES, 2), start=2):
        group.forget_nodes(gone, generation)
        reader = next(node for node in NODES if node not in gone)
        for node in gone:
            if node.startswith("n"):
                group.check_rebuilt(int(node[1:]) - 1, reader)


def test_parity_has_the_longest_member_size_and_is_made_once(group: Group) -> None:
    before = [counter(group, "p", name) for name in ("parity_slots", "parity_bytes")]
    group.protect_all()
    group.protect_all()
    after = [counter(group, "p", name) for name in ("parity_slots", "parity_bytes")]
    assert [new - other for new, other in zip(after, before, strict=True)] == [1, parity_bytes(max(SIZES))]


def test_third_loss_is_refused_with_names_and_reasons(group: Group) -> None:
    group.protect_all()
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


def test_parity_is_not_made_of_corrupt_shards(group: Group) -> None:
    member = group.ranks[3]
    view = map_segment(member.path)
    payload = view.payload(0)
    payload[4_000_000] ^= 1
    answer = group.protect("p")
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "digest_mismatch"
    payload[4_000_000] ^= 1
    member.fill(0, V, group.payloads[3], manifest=b"manifest of rank 13")
    group.protect_all()
    group.forget_nodes(("n1", "n2"), 2)
    group.check_rebuilt(0, "q")


def test_member_sending_wrong_bytes_is_detected_and_named(group: Group) -> None:
    liar = CorruptingVault(group.payloads[1])
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
    group.protect_all()
    liar = group.ranks[1]
    other = bytearray(group.payloads[1])
    other[77] ^= 1
    liar.fill(0, V, bytes(other), manifest=b"manifest of rank 11")
    group.forget_nodes(("n1",), 2)
    group.check_rebuilt(0, "q")
    finding = group.fleet.supervisors["q"].finding().finding.finding
    assert finding.kind is FindingKind.TRANSFER_CORRUPT
    assert finding.subject == "n2"
    group.forget_nodes(("n1", "p"), 3)
    answer = group.fetch(0, "q", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "not_restorable"
    assert "chunk 0 differs from the sealed bytes" in answer.message


def test_corrupt_parity_is_skipped_where_the_other_suffices(group: Group) -> None:
    group.protect_all()
    vault = group.fleet.all[NODES.index("p")]
    view = map_segment(vault.segment_dir / JOB / "parity-7")
    ((slot, _),) = view.sealed_slots()
    view.payload(slot)[123_456] ^= 8
    group.forget_nodes(("n1",), 2)
    group.check_rebuilt(0, "n2")
    finding = group.fleet.supervisors["p"].finding().finding.finding
    assert finding.kind is FindingKind.SLOT_CORRUPT
    assert finding.subject == "job/parity-7/1:5"


def test_wrongly_made_parity_is_detected_by_its_result(group: Group) -> None:
    """The member's own digests are right, but data rebuilt from it differs from the lost rank's sealed data."""
    group.protect_all()
    view = map_segment(group.fleet.all[NODES.index("p")].segment_dir / JOB / "parity-7")
    ((slot, header),) = view.sealed_slots()
    manifest, wrong = view.manifest(slot), bytearray(view.payload(slot))
    wrong[3] ^= 1
    view.begin(slot, header.rank, V, manifest, len(wrong))[:] = wrong
    view.seal(slot)
    group.forget_nodes(("n1",), 2)
    group.check_rebuilt(0, "n4")
    group.forget_nodes(("n1", "n2"), 3)
    answer = group.fetch(0, "n4", ((0, 10),))
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "digest_mismatch"
