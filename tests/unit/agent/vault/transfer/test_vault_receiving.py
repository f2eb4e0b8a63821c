"""Transfers that are cut off, sent twice, or whose job has ended: they leave no unhashed bytes, slot or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import xxhash

from everstep.errors import Conflict, MalformedMessage, OutOfSlotMemory, Unavailable
from everstep.ids import Version
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import CHUNK_BYTES
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import VaultChannel
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import PIECE_VALID, Ack, ManifestPart, Part, PartDone, Put, PutDone, Ready, chunk_bitmap
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.transfer.receiving import IncomingTransfer, SlotReceiver, fill_from_other_versions
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, SECRET, Vaults, vaults
from tests.unit.agent.vault.transfer.test_vault_strangers import MANIFEST, Wire, begin, bulk, put


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with vaults(program_forks) as running:
        running.start("n1")
        running.configure()
        yield running


@pytest.fixture
def wire(fleet: Vaults) -> Iterator[Wire]:
    connections = Wire(fleet.all[0].address)
    yield connections
    connections.close()


def _sent(channel: VaultChannel, transfer: bytes, payload: bytes) -> None:
    channel.send(Part(transfer=transfer, first_chunk=0, chunks=1))
    bulk(channel, payload, PIECE_VALID)
    channel.receive_answer(PartDone)


class _Sender:
    """A connection of n8 that sends these bytes, and calls ``half_way`` when it has sent half of them."""

    def __init__(self, payload: bytes, half_way: Callable[[], object] | None = None) -> None:
        self._payload = payload
        self._half_way = half_way

    def receive_into(self, view: memoryview) -> None:
        half = len(view) // 2
        view[:half] = self._payload[:half]
        if self._half_way is not None:
            self._half_way()
            view[half : half + 1] = self._payload[half : half + 1]
            raise Unavailable("the connection broke")
        view[half:] = self._payload[half:]

    def receive_piece_status(self) -> bool:
        return True


@pytest.mark.parametrize("damage", ["chunk", "manifest"])
def test_concurrent_chunk_cut_off_last_counts_as_missing(tmp_path: Path, damage: str) -> None:
    """Otherwise a slot with wrong bytes would be sealed, and this node blamed for it."""
    store, book, tally = SegmentStore(tmp_path, "n1", None), JobTable(), VaultCounters()
    book.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=()))
    receiver = SlotReceiver(store, book, FindingReporter("n1", SYSTEM_CLOCK, tally, lambda raised: None), tally)
    incoming = receiver.begin(JOB, "n8", put(bytes(1000)))
    assert incoming is not None

    def chunk(sender: _Sender) -> None:
        receiver.receive_part(
            JOB, "n8", Part(transfer=incoming.id, first_chunk=0, chunks=1), cast(VaultChannel, sender)
        )

    def manifest(sender: _Sender) -> None:
        receiver.receive_manifest(JOB, "n8", ManifestPart(transfer=incoming.id), cast(VaultChannel, sender))

    send, other, right = (chunk, manifest, bytes(1000)) if damage == "chunk" else (manifest, chunk, MANIFEST)
    other(_Sender(MANIFEST if damage == "chunk" else bytes(1000)))
    with pytest.raises(Unavailable):
        send(_Sender(b"\1" * len(right), lambda: send(_Sender(right))))
    with pytest.raises(Conflict, match="received"):
        receiver.finish(JOB, "n8", incoming.id)
    send(_Sender(right))
    receiver.finish(JOB, "n8", incoming.id)


@pytest.mark.parametrize("half_sent", [False, True])
def test_transfer_of_an_ended_generation_holds_no_slot(fleet: Vaults, wire: Wire, half_sent: bool) -> None:
    """The sender may disappear silently. With two slots the other one holds the committed version."""
    committed = Version(1, 1)
    sender = wire.proved(node="n8")
    transfer = begin(sender, put(b"committed", slots=2))
    _sent(sender, transfer, b"committed")
    sender.send(PutDone(transfer=transfer))
    sender.receive_answer(Ack)
    stale = begin(sender, put(bytes(1000), slots=2, version=Version(1, 2), keep=(committed,)))
    if half_sent:
        sender.send(Part(transfer=stale, first_chunk=0, chunks=1))
        bulk(sender, bytes(500))
    fleet.configure(generation=2)
    other = wire.proved(node="n9")
    newer = put(b"newer", slots=2, generation=2, version=Version(2, 3), keep=(committed,))

    transfer = until(lambda: _begun(other, newer), "the slot is free")
    _sent(other, transfer, b"newer")
    other.send(PutDone(transfer=transfer))
    other.receive_answer(Ack)


def _begun(channel: VaultChannel, message: Put) -> bytes:
    try:
        return begin(channel, message)
    except OutOfSlotMemory:
        return b""


@pytest.mark.parametrize("closed", [False, True], ids=["old connection open", "closed"])
def test_repeated_offer_resumes_the_earlier_transfer(fleet: Vaults, wire: Wire, closed: bool) -> None:
    """The vault resumes even if it has not seen the end of the old connection."""
    payload = bytes(CHUNK_BYTES) + b"\1" * 1000
    first = wire.proved()
    transfer = begin(first, put(payload))
    _sent(first, transfer, payload[:CHUNK_BYTES])
    first.send(Part(transfer=transfer, first_chunk=1, chunks=1))
    bulk(first, payload[CHUNK_BYTES:-1])
    if closed:
        first.close()
    second = wire.proved()
    second.send(put(payload))
    ready = second.receive_answer(Ready)
    assert (ready.needs_manifest, ready.present_chunks) == (False, chunk_bitmap([0]))
    second.send(Part(transfer=ready.transfer, first_chunk=1, chunks=1))
    bulk(second, payload[CHUNK_BYTES:], PIECE_VALID)
    second.receive_answer(PartDone)
    second.send(PutDone(transfer=ready.transfer))
    second.receive_answer(Ack)
    if not closed:
        with pytest.raises((Unavailable, MalformedMessage)):  # ended, or refused if its part was read after the offer
            first.receive_answer(PartDone)


@pytest.mark.promise("memory-limit")
def test_job_ending_during_a_copy_releases_its_memory(fleet: Vaults, wire: Wire) -> None:
    channel = wire.proved()
    begin(channel, put(bytes(1000)))
    maps = Path(f"/proc/{fleet.all[0].process.pid}/maps")
    assert "replica-0" in maps.read_text()
    fleet.supervisors["n1"].ask(local.ForgetJob, job=JOB)
    channel.close()
    until(lambda: "replica-0" not in maps.read_text(), "nothing of it is mapped any more")


def test_vanished_source_version_does_not_fail_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reader found the slot corrupt and discarded it. The failed transfer must not keep its own slot."""
    segment = SegmentStore(tmp_path, "n1", None).open(SegmentKey(JOB, "replica", 0), 1 << 16, 4)
    view = segment.view
    view.begin(0, 0, Version(1, 1), MANIFEST, 5)[:] = b"other"
    sealed = view.seal(0)
    digests = view.digests

    def and_gone(slot: int) -> list[bytes]:
        found = digests(slot)
        view.discard(slot)
        return found

    monkeypatch.setattr(view, "digests", and_gone)
    monkeypatch.setattr(view, "manifest", lambda slot: MANIFEST)
    incoming = IncomingTransfer(JOB, "n8", put(b"other", version=Version(1, 2)), segment, 1)
    assert sealed.state is SlotState.SEALED
    assert incoming.digests[1] == xxhash.xxh3_128_digest(b"other")
    assert fill_from_other_versions(incoming) == 0
    assert incoming.received_chunks == set()
