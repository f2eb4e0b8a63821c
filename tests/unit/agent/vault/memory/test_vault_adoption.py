"""Slots of an earlier vault: each one is served only after it was hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import pytest

from everstep.errors import DigestMismatch
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import Put
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.reading import SlotFinder
from everstep_agent.vault.memory.segments import SegmentFile, SegmentKey, SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.transfer.receiving import _holds
from tests.support.vaults.peer_reads import peer_connection, rank_client, read
from tests.support.vaults.slow_vault import HASHING_BLOCKED_BY
from tests.support.vaults.vault_process import DEADLINE_S, JOB, RankMemory, Vaults, map_segment, noise, vaults

HashSlot: TypeAlias = Callable[[SegmentAdoption, SegmentFile, int, SlotHeader], bool]
KEY = SegmentKey(JOB, "own", 0)
LENGTH = CHUNK_BYTES + 1000


@pytest.fixture
def fleet() -> Iterator[Vaults]:
    with vaults() as running:
        yield running


class EarlierVault:
    """Two slots of an earlier vault, with versions 1:n of rank 0, and a store that hashes them after ``let_hash``."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, slots: int = 2, threads: int = 1) -> None:
        directory.mkdir(mode=0o700)
        path = SegmentStore(directory, "n1", None).open(KEY, slot_bytes_for(16, LENGTH), 5).path
        self.view = map_segment(path)
        for slot in range(slots):
            self.fill(slot, Version(1, slot))
        self.reported: list[str] = []
        self.order: list[int] = []
        self._may_hash = threading.Event()
        monkeypatch.setattr(SegmentAdoption, "_hash", self._wait_before(SegmentAdoption._hash))
        self.store = SegmentStore(directory, "n1", None)
        self.adoption = SegmentAdoption(self.store, threads)

    def _wait_before(self, hashed: HashSlot) -> HashSlot:
        def wait(adoption: SegmentAdoption, segment: SegmentFile, slot: int, header: SlotHeader) -> bool:
            assert self._may_hash.wait(DEADLINE_S)
            self.order.append(slot)
            return bool(hashed(adoption, segment, slot, header))

        return wait

    def fill(self, slot: int, version: Version) -> None:
        self.view.begin(slot, 0, version, b"manifest", LENGTH)[:] = noise(LENGTH, version.step)
        self.view.seal(slot)

    def corrupt(self, slot: int) -> None:
        self.view.payload(slot)[LENGTH - 1] ^= 1

    def begin(self) -> int:
        found = self.adoption.adopt_segments()
        self.store.set_damage_handler(lambda damage: self.reported.append(damage.message))
        self.adoption.start()
        return found

    def let_hash(self) -> None:
        self._may_hash.set()

    def segment(self) -> SegmentFile:
        found = self.store.get(KEY)
        assert found is not None
        return found

    def listed(self, patience_s: float = 0.0) -> tuple[set[int], int]:
        slots, unchecked = self.adoption.inventory(JOB, patience_s)
        return {slot.version.step for slot in slots}, unchecked

    def close(self) -> None:
        self.let_hash()
        self.adoption.stop()


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EarlierVault]:
    made = EarlierVault(tmp_path / "segments", monkeypatch)
    yield made
    made.close()


@pytest.mark.promise("vault-restart")
def test_adopted_slot_is_listed_only_after_hashing(earlier: EarlierVault) -> None:
    earlier.corrupt(1)
    assert earlier.begin() == 2
    assert earlier.listed() == (set(), 2)
    assert earlier.segment().sealed() == []
    earlier.let_hash()
    assert earlier.listed(DEADLINE_S) == ({0}, 0)
    assert [slot for slot, _ in earlier.segment().sealed()] == [0]
    assert len(earlier.reported) == 1
    assert "the slot is discarded" in earlier.reported[0]
    assert earlier.view.header(1) is None


@pytest.mark.promise("vault-restart")
def test_unchecked_slot_is_hashed_on_demand_before_serving(earlier: EarlierVault) -> None:
    earlier.corrupt(1)
    earlier.begin()
    library = SlotFinder(earlier.store, FindingReporter("n1", SYSTEM_CLOCK, VaultCounters(), lambda _: None))
    served = library.open(JOB, 0, Version(1, 0), ((0, LENGTH),))
    assert bytes(served.payload) == noise(LENGTH, 0)
    with pytest.raises(DigestMismatch):
        library.open(JOB, 0, Version(1, 1), ((LENGTH - 10, 10),))
    assert earlier.view.header(1) is None


def test_unchecked_slot_is_hashed_even_for_unhashed_reads(earlier: EarlierVault) -> None:
    earlier.begin()
    library = SlotFinder(earlier.store, FindingReporter("n1", SYSTEM_CLOCK, VaultCounters(), lambda _: None))
    chunks = [(at, min(CHUNK_BYTES, LENGTH - at)) for at in range(0, LENGTH, CHUNK_BYTES)]
    earlier.corrupt(1)
    with pytest.raises(DigestMismatch):
        list(library.read_pieces(JOB, 0, Version(1, 1), chunks, skip_own_chunks=True))
    earlier.let_hash()
    assert earlier.listed(DEADLINE_S) == ({0}, 0)
    earlier.corrupt(0)
    sent = [
        bytes(view)
        for _, views in library.read_pieces(JOB, 0, Version(1, 0), chunks, skip_own_chunks=True)
        for view in views
    ]
    assert b"".join(sent) == bytes(earlier.view.payload(0)) != noise(LENGTH, 0)


def test_unchecked_slot_does_not_count_as_a_copy(earlier: EarlierVault) -> None:
    earlier.begin()
    _, header = next(iter(earlier.view.sealed_slots()))
    digests = earlier.view.digests(0)
    put = Put(
        generation=1,
        rank=0,
        version=header.version,
        slot_bytes=earlier.view.slot_bytes,
        slots=earlier.view.slots,
        manifest_bytes=header.manifest_bytes,
        payload_bytes=header.payload_bytes,
        digests=b"".join(digests),
    )
    assert not _holds(earlier.segment(), put)
    earlier.let_hash()
    assert earlier.listed(DEADLINE_S) == ({0, 1}, 0)
    assert _holds(earlier.segment(), put)


def test_ending_vault_stops_hashing(earlier: EarlierVault) -> None:
    earlier.begin()
    earlier.adoption._stopping = True
    earlier.let_hash()
    earlier.adoption.stop()
    assert earlier.listed() == (set(), 2)
    earlier.view.verify(0)


@pytest.mark.promise("vault-restart")
@pytest.mark.slow
def test_vault_serves_verified_slots_while_hashing_others(
    fleet: Vaults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0, slot_bytes=slot_bytes_for(16, LENGTH))
    rank.fill(0, Version(1, 1), noise(LENGTH, 1))
    rank.fill(1, Version(1, 2), noise(LENGTH, 2))
    rank.view.payload(1)[0] ^= 1
    vault.kill()
    held = tmp_path / "held"
    held.touch()
    monkeypatch.setenv(HASHING_BLOCKED_BY, str(held))
    vault.module = "tests.support.vaults.slow_vault"
    vault.start()
    client = fleet.configure(vault)["n1"]
    statistics = client.statistics()
    assert statistics.gauges["sealed_slots"] == 0
    listed = client.post(local.Inventory, job=JOB)
    sealed = client.post(local.SlotSealed, job=JOB, generation=1, rank=0, local_rank=0, slot=1, version=Version(1, 2))

    with rank_client(vault) as reader, closing(peer_connection(reader, "n1")) as channel:
        assert read(channel, 0, Version(1, 1), [(0, LENGTH)]) == noise(LENGTH, 1)
        with pytest.raises(DigestMismatch):
            read(channel, 0, Version(1, 2), [(0, LENGTH)])
    assert client.finding().finding.finding.subject == f"{JOB}/rank0/1:2"
    held.unlink()
    answer = client.wait(listed)
    assert isinstance(answer, local.InventoryAnswer)
    assert ([slot.version for slot in answer.slots], answer.unchecked) == ([Version(1, 1)], 0)
    refused = client.wait(sealed)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "not_found"
