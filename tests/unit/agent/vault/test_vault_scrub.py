"""A bit that flips in memory at rest is found and reported, and its slot is discarded."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.ids import Version
from everstep.layout.segment_header import PAGE_BYTES
from everstep.layout.slot_header import RECORD_OFFSETS, SlotState
from everstep.layout.slots import CHUNK_BYTES, SegmentView, slot_bytes_for
from everstep.vocabulary import Action, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.reading import SlotFinder
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
from everstep_agent.vault.parity.coding import ParityDecoder
from everstep_agent.vault.parity.shards import ShardReader
from everstep_agent.vault.repair import Scrubber, SlotRepairer
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peers import PeerLossDetector, PeerPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, map_segment, noise

SIZE = CHUNK_BYTES + 100


class Bench:
    """A store with one own segment of four slots, and a scrubber that runs on request."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self.store = SegmentStore(directory, "n1", None)
        self.segment = self.store.open(SegmentKey(JOB, "own", 0), slot_bytes_for(16, SIZE), 4)
        self.rank: SegmentView = map_segment(self.segment.path)
        self.reported: list[FindingRaised] = []
        self.tally = VaultCounters()
        clock = ManualClock()
        findings = FindingReporter("n1", clock, self.tally, self.reported.append)
        self.store.set_damage_handler(findings.report_damage)
        settings = VaultSettings(node="n1", run_dir=directory, segment_dir=directory)
        book = JobTable()
        peers = PeerPool(settings, book, clock, PeerLossDetector("n1", book, clock, lambda _: None))
        shards = ShardReader(settings, SlotFinder(self.store, findings), peers, findings)
        decoder = ParityDecoder(
            "n1", self.store, book, shards, self.tally, ThreadPoolExecutor(1)
        )  # which starts no thread unasked
        repairer = SlotRepairer(settings, book, self.store, peers, decoder)
        self.scrubber = Scrubber(repairer, findings, self.tally, clock, 1.0, 1e12)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.scrubber.run_round()

    def fill(self, slot: int, version: Version) -> None:
        self.rank.begin(slot, 2, version, b"manifest", SIZE)[:] = noise(SIZE)
        self.rank.seal(slot)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "segments")


@pytest.mark.parametrize(("at", "text"), [(3, "chunk 0"), (CHUNK_BYTES + 9, "chunk 1")])
def test_flipped_bit_is_found_and_reported_once(bench: Bench, at: int, text: str) -> None:
    bench.fill(1, Version(4, 5))
    bench.rank.payload(1)[at] ^= 16
    bench.rounds(3)
    (raised,) = bench.reported
    finding = raised.finding
    assert raised.job == JOB
    assert (finding.kind, finding.severity) == (FindingKind.SLOT_CORRUPT, Severity.WARNING)
    assert finding.subject == "job/rank2/4:5"
    assert text in finding.message
    assert (finding.action, finding.mode) == (Action.NONE, Mode.OBSERVE)
    assert finding.trace
    assert bench.rank.header(1) is None
    assert bench.tally.read_all()[0]["corrupt_slots"] == 1


def test_flipped_bit_in_the_manifest_is_found(bench: Bench) -> None:
    bench.fill(0, Version(1, 1))
    image = bytearray(bench.segment.path.read_bytes())
    at = image.index(b"manifest")
    with bench.segment.path.open("r+b") as file:
        file.seek(at)
        file.write(b"n")
    bench.rounds(2)
    assert "manifest" in bench.reported[0].finding.message


def test_flipped_chunk_digest_is_repaired_from_the_slot(bench: Bench) -> None:
    bench.fill(0, Version(1, 1))
    flip(bench, bench.rank.segment.slot_offset(0) + PAGE_BYTES + 17)
    bench.rounds(3)
    (raised,) = bench.reported
    assert "the chunk digests" in raised.finding.message
    assert "repaired from its own bytes" in raised.finding.message
    bench.rank.verify(0)


def test_flipped_digest_and_payload_discard_the_slot(bench: Bench) -> None:
    bench.fill(0, Version(1, 1))
    flip(bench, bench.rank.segment.slot_offset(0) + PAGE_BYTES + 17)
    bench.rank.payload(0)[5] ^= 1
    bench.rounds(2)
    assert "the slot is discarded" in bench.reported[0].finding.message
    assert bench.rank.header(0) is None


@pytest.mark.promise("bit-flips")
@pytest.mark.parametrize("number", [0, 1])
def test_flipped_slot_header_bit_is_repaired_and_reported_once(bench: Bench, number: int) -> None:
    bench.fill(1, Version(4, 5))
    good = bench.rank.read_records(1)
    flip(bench, bench.rank.segment.slot_offset(1) + RECORD_OFFSETS[number] + 9)
    bench.rounds(1)
    assert bench.reported == []  # it may be a writer at work
    bench.rounds(3)
    (raised,) = bench.reported
    assert raised.finding.subject == "job/rank2/4:5"
    assert "restored from its second copy" in raised.finding.message
    assert bench.rank.read_records(1) == good


def test_slot_without_a_valid_header_is_reported_and_freed(bench: Bench) -> None:
    bench.fill(1, Version(4, 5))
    for place in RECORD_OFFSETS:
        flip(bench, bench.rank.segment.slot_offset(1) + place + 9)
    bench.rounds(3)
    (raised,) = bench.reported
    assert raised.finding.subject == "job/own-0/slot1"
    assert bench.rank.read_records(1).state is SlotState.EMPTY


def test_overwritten_segment_is_rebuilt_from_vault_state(bench: Bench) -> None:
    bench.fill(1, Version(4, 5))
    bench.rank._buffer[:] = bytes(len(bench.rank._buffer))
    bench.rounds(3)
    assert {raised.finding.subject for raised in bench.reported} == {
        "job/own-0",
        *(f"job/own-0/slot{i}" for i in range(4)),
    }
    bench.fill(1, Version(4, 6))
    map_segment(bench.segment.path).verify(1)


def test_missing_or_truncated_segment_does_not_end_scrubbing(bench: Bench) -> None:
    bench.fill(1, Version(4, 5))
    bench.rounds(1)
    bench.rank.payload(1)[3] ^= 1
    flip(bench, 13)
    bench.segment.path.rename(bench.segment.path.parent / "elsewhere")
    bench.segment.path.write_bytes(b"short")
    bench.rounds(3)
    bench.segment.path.unlink()
    bench.rounds(2)
    assert bench.reported == []


def flip(bench: Bench, at: int) -> None:
    bench.rank._buffer[at] ^= 4


def test_slot_refilled_repeatedly_is_never_misjudged(bench: Bench) -> None:
    done = threading.Event()

    def train() -> None:
        for step in range(60):
            slot = step % 4
            payload = bench.rank.begin(slot, 2, Version(1, step), b"manifest", SIZE)
            payload[:] = bytes([step]) * SIZE
            bench.rank.seal(slot)
        done.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    while not done.is_set():
        bench.scrubber.run_round()
    trainer.join()
    assert bench.reported == []
    assert len(list(bench.rank.sealed_slots())) == 4


def test_failed_scrub_round_is_followed_by_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(0, Version(1, 1))
    mend, short = bench.segment.repair_header, [True, True]

    def none_left() -> bool:
        if short:
            short.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return mend()

    monkeypatch.setattr(bench.segment, "repair_header", none_left)
    monkeypatch.setattr(bench.scrubber, "_interval_s", 0.0)
    bench.scrubber.start()
    try:
        until(lambda: bench.tally.read_all()[0]["scrubbed_slots"], "it is hashed all the same")
    finally:
        bench.scrubber.stop()
