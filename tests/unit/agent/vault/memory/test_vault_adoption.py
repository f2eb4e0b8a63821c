"""Slots of an earlier vault: they are served at once, and each one only after it was hashed."""

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


class Left:
    """The slots of an earlier vault, 1:n of rank 0 in slot ``n``, and a store that hashes them after ``go``."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, slots: int = 2, threads: int = 1) -> None:
        directory.mkdir(mode=0o700)
        path = SegmentStore(directory, "n1", None).open(KEY, slot_bytes_for(16, LENGTH), 5).path
        self.view = map_segment(path)
        for slot in range(slots):
            self.fill(slot, Version(1, slot))
        self.rot: set[int] = set()
        self.told: list[str] = []
        self.order: list[int] = []
        self._go = threading.Event()
        monkeypatch.setattr(SegmentAdoption, "_hash", self._held(SegmentAdoption._hash))
        self.store = SegmentStore(directory, "n1", None)
        self.adoption = SegmentAdoption(self.store, threads)

    def _held(self, hashed: HashSlot) -> HashSlot:
        def wait(adoption: SegmentAdoption, segment: SegmentFile, slot: int, header: SlotHeader) -> bool:
            assert self._go.wait(DEADLINE_S)
            self.order.append(slot)
            return bool(hashed(adoption, segment, slot, header))

        return wait

    def fill(self, slot: int, version: Version) -> None:
        self.view.begin(slot, 0, version, b"manifest", LENGTH)[:] = noise(LENGTH, version.step)
        self.view.seal(slot)

    def spoil(self, slot: int) -> None:
        self.view.payload(slot)[LENGTH - 1] ^= 1

    def begin(self) -> int:
        found = self.adoption.adopt_segments()
        self.store.set_damage_handler(lambda damage: self.told.append(damage.message))
        self.adoption.start()
        return found

    def go(self) -> None:
        self._go.set()

    def segment(self) -> SegmentFile:
        found = self.store.get(KEY)
        assert found is not None
        return found

    def listed(self, patience_s: float = 0.0) -> tuple[set[int], int]:
        slots, unchecked = self.adoption.inventory(JOB, patience_s)
        return {slot.version.step for slot in slots}, unchecked

    def close(self) -> None:
        self.go()
        self.adoption.stop()


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    made = Left(tmp_path / "segments", monkeypatch)
    yield made
    made.close()


@pytest.mark.promise("vault-restart")
def test_adopted_slot_is_listed_only_after_hashing(left: Left) -> None:
    left.spoil(1)
    assert left.begin() == 2
    assert left.listed() == (set(), 2)
    assert left.segment().sealed() == []
    left.go()
    assert left.listed(DEADLINE_S) == ({0}, 0)
    assert [slot for slot, _ in left.segment().sealed()] == [0]
    assert len(left.told) == 1
    assert "the slot is discarded" in left.told[0]
    assert left.view.header(1) is None


@pytest.mark.promise("vault-restart")
def test_unchecked_slot_is_hashed_on_demand_before_serving(left: Left) -> None:
    left.spoil(1)
    left.begin()
    library = SlotFinder(left.store, FindingReporter("n1", SYSTEM_CLOCK, VaultCounters(), lambda _: None))
    served = library.open(JOB, 0, Version(1, 0), ((0, LENGTH),))
    assert bytes(served.payload) == noise(LENGTH, 0)
    with pytest.raises(DigestMismatch):
        library.open(JOB, 0, Version(1, 1), ((LENGTH - 10, 10),))
    assert left.view.header(1) is None


def test_unchecked_slot_is_hashed_even_for_unhashed_reads(left: Left) -> None:
    left.begin()
    library = SlotFinder(left.store, FindingReporter("n1", SYSTEM_CLOCK, VaultCounters(), lambda _: None))
    chunks = [(at, min(CHUNK_BYTES, LENGTH - at)) for at in range(0, LENGTH, CHUNK_BYTES)]
    left.spoil(1)
    with pytest.raises(DigestMismatch):
        list(library.read_pieces(JOB, 0, Version(1, 1), chunks, skip_own_chunks=True))
    left.go()
    assert left.listed(DEADLINE_S) == ({0}, 0)
    left.spoil(0)
    sent = [
        bytes(view)
        for _, views in library.read_pieces(JOB, 0, Version(1, 0), chunks, skip_own_chunks=True)
        for view in views
    ]
    assert b"".join(sent) == bytes(left.view.payload(0)) != noise(LENGTH, 0)


def test_unchecked_slot_does_not_count_as_a_copy(left: Left) -> None:
    left.begin()
    _, header = next(iter(left.view.sealed_slots()))
    digests = left.view.digests(0)
    put = Put(
        generation=1,
        rank=0,
        version=header.version,
        slot_bytes=left.view.slot_bytes,
        slots=left.view.slots,
        manifest_bytes=header.manifest_bytes,
        payload_bytes=header.payload_bytes,
        digests=b"".join(digests),
    )
    assert not _holds(left.segment(), put)
    left.go()
    assert left.listed(DEADLINE_S) == ({0, 1}, 0)
    assert _holds(left.segment(), put)


def test_ending_vault_stops_hashing(left: Left) -> None:
    left.begin()
    left.adoption._stopping = True
    left.go()
    left.adoption.stop()
    assert left.listed() == (set(), 2)
    left.view.verify(0)


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
