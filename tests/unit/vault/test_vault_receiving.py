"""Transfers that are cut off, sent twice, or outlived by their job: no bytes unhashed, no slot and no memory held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from agent.vault.receive import Incoming, fill_from_other_versions
from agent.vault.segments import SegmentKey, SegmentStore
from everstep.channel import Channel
from everstep.errors import Conflict, OutOfSlotMemory
from everstep.ids import Version
from everstep.slots import SlotState
from everstep.wire.v1 import supervision
from everstep.wire.v1.transfer import PIECE_GOOD, Ack, Part, PartDone, Put, PutDone
from tests.support.forked import ForkPool
from tests.support.vaults import JOB, Vaults, vaults
from tests.support.waiting import until
from tests.unit.vault.test_vault_strangers import MANIFEST, Wire, begin, bulk, put


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


def _wait_for_connections(fleet: Vaults, count: int) -> None:
    client = fleet.supervisors["n1"]
    until(lambda: client.ask(supervision.Statistics).levels["peer_connections"] == count, f"{count} connections")


def _sent(channel: Channel, transfer: bytes, payload: bytes) -> None:
    channel.send(Part(transfer=transfer, first=0, chunks=1))
    bulk(channel, payload, PIECE_GOOD)
    channel.answer(PartDone)


def test_a_chunk_that_is_sent_once_more_and_cut_off_counts_no_longer(fleet: Vaults, wire: Wire) -> None:
    first, second = wire.proved(), wire.proved()
    transfer = begin(first, put(bytes(1000)))
    _sent(first, transfer, bytes(1000))
    second.send(Part(transfer=transfer, first=0, chunks=1))
    bulk(second, b"\1" * 500)
    second.close()
    _wait_for_connections(fleet, 1)
    first.send(PutDone(transfer=transfer))
    with pytest.raises(Conflict, match="0 of 1 chunks have come"):
        first.answer(Ack)
    _sent(first, transfer, bytes(1000))
    first.send(PutDone(transfer=transfer))
    first.answer(Ack)


@pytest.mark.parametrize("half_sent", [False, True])
def test_a_transfer_of_a_generation_that_is_over_holds_no_slot(fleet: Vaults, wire: Wire, half_sent: bool) -> None:
    """Its sender may be gone without a word. With two slots the other one holds what is committed."""
    committed = Version(1, 1)
    sender = wire.proved(node="n8")
    transfer = begin(sender, put(b"committed", slots=2))
    _sent(sender, transfer, b"committed")
    sender.send(PutDone(transfer=transfer))
    sender.answer(Ack)
    stale = begin(sender, put(bytes(1000), slots=2, version=Version(1, 2), keep=(committed,)))
    if half_sent:
        sender.send(Part(transfer=stale, first=0, chunks=1))
        bulk(sender, bytes(500))
    fleet.configure(generation=2)
    other = wire.proved(node="n9")
    newer = put(b"newer", slots=2, generation=2, version=Version(2, 3), keep=(committed,))

    transfer = until(lambda: _begun(other, newer), "the slot is free", deadline_s=5.0)
    _sent(other, transfer, b"newer")
    other.send(PutDone(transfer=transfer))
    other.answer(Ack)


def _begun(channel: Channel, message: Put) -> bytes:
    try:
        return begin(channel, message)
    except OutOfSlotMemory:
        return b""


def test_memory_of_a_job_that_ended_in_the_middle_of_a_copy_is_given_back(fleet: Vaults, wire: Wire) -> None:
    channel = wire.proved()
    begin(channel, put(bytes(1000)))
    maps = Path(f"/proc/{fleet.all[0].process.pid}/maps")
    assert "replica-0" in maps.read_text()
    fleet.supervisors["n1"].ask(supervision.Forget, job=JOB)
    channel.close()
    until(lambda: "replica-0" not in maps.read_text(), "nothing of it is mapped any more")


def test_another_version_that_goes_while_it_is_copied_from_costs_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot was discarded by who found it rotten: the transfer failed, and held its own slot for good."""
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
    incoming = Incoming(JOB, "n8", put(b"other", version=Version(1, 2)), segment, 1)
    assert sealed.state is SlotState.SEALED
    assert incoming.digests[1] == xxhash.xxh3_128_digest(b"other")
    assert fill_from_other_versions(incoming) == 0
    assert incoming.done == set()
