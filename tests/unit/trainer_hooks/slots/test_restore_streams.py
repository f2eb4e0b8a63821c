"""Restore streams: received bytes are written into their tensors, and count only with the right digest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.transfer import Data, DataEnd, Get, refused_from_error
from everstep_trainer.slots import byte_moves as cutting
from everstep_trainer.slots import remote_slots as module
from everstep_trainer.slots.byte_moves import FetchBatch, TensorCopies, split_into_batches
from everstep_trainer.slots.remote_slots import BadTransfer, SlotStreams
from tests.support.plugins.example_counts import examples
from tests.support.vaults.fake_vault_client import (
    DEADLINE_S,
    Behaviour,
    FakeVaultClient,
    fake_vault_client,
    refuse,
    requested_bytes,
    serve,
    serve_like_a_vault,
)

BATCH, BLOCK = 1 << 14, 1 << 12
PAYLOAD = b"".join(number.to_bytes(4, "little") for number in range(10 * BATCH // 4))


def slot(node: str = "n2", rank: int = 0) -> SlotInfo:
    return SlotInfo(node=node, rank=rank, version=Version(1, 1), path="", slot=0, replica=False, manifest_digest="")


@pytest.fixture(autouse=True)
def small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BATCH_BYTES", BATCH)
        patch.setattr(cutting, "GAP_BYTES", 100)
        patch.setattr(module, "BLOCK_BYTES", BLOCK)
        yield


def planned(pieces: list[tuple[int, int]], of: SlotInfo | None = None) -> tuple[list[torch.Tensor], list[FetchBatch]]:
    moves, targets = TensorCopies(), []
    for at, length in pieces:
        targets.append(torch.zeros(length, dtype=torch.uint8))
        moves.add(targets[-1], [(at, length)])
    return targets, list(split_into_batches(of or slot(), moves.table()))


def received(vault: FakeVaultClient, batches: list[FetchBatch]) -> SlotStreams:
    stand_in: Any = vault
    streams = SlotStreams(stand_in, "job", batches)
    streams.finish()
    streams.close()
    return streams


def bytes_of(targets: list[torch.Tensor]) -> list[bytes]:
    return [target.numpy().tobytes() for target in targets]


spots = st.tuples(st.integers(0, 9 * BATCH), st.integers(1, BATCH))


@settings(max_examples=examples(20))
@given(st.lists(spots, min_size=1, max_size=80))
def test_received_ranges_land_in_their_tensors(pieces: list[tuple[int, int]]) -> None:
    targets, batches = planned(pieces)
    with fake_vault_client({0: PAYLOAD}) as vault:
        assert received(vault, batches).failures == []
    assert bytes_of(targets) == [PAYLOAD[at : at + length] for at, length in pieces]


@pytest.mark.slow
def test_chunks_are_requested_singly_over_several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "BATCH_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(module, "BLOCK_BYTES", 256 << 10)
    size = 8 * CHUNK_BYTES + 5
    payload = bytes(CHUNK_BYTES) + PAYLOAD * (7 * CHUNK_BYTES // len(PAYLOAD) + 1)
    targets, batches = planned([(0, size)])
    with fake_vault_client({0: payload}) as vault:
        assert received(vault, batches).failures == []
        assert len(vault.connected) == 2
        chunks = sorted(each for _, ranges in vault.requests for each in ranges)
    assert chunks == [(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)]
    assert bytes_of(targets) == [payload[:size]]


def wrong_digest(channel: VaultChannel, get: Get, payload: bytes) -> None:
    data = bytearray(requested_bytes(get, payload))
    data[len(data) // 2] ^= 1
    digests = b"".join(xxhash.xxh3_128_digest(payload[at : at + length]) for at, length in get.ranges)
    serve(channel, bytes(data), digests)


def no_digests(channel: VaultChannel, get: Get, payload: bytes) -> None:
    serve(channel, requested_bytes(get, payload), b"")


def close_halfway(channel: VaultChannel, get: Get, payload: bytes) -> None:
    data = requested_bytes(get, payload)
    channel.send(Data(bytes=len(data)))
    channel.send_bulk([memoryview(data)[: len(data) // 2]])
    channel.close()


def announce_wrong_size(more: int) -> Behaviour:
    def act(channel: VaultChannel, get: Get, payload: bytes) -> None:
        channel.send(Data(bytes=len(requested_bytes(get, payload)) + more))

    return act


def refuse_while_sending(channel: VaultChannel, get: Get, payload: bytes) -> None:
    data = requested_bytes(get, payload)
    channel.send(Data(bytes=len(data)))
    channel.send_bulk([memoryview(data)])
    channel.send_piece_status(False)
    channel.send(refused_from_error(DigestMismatch("chunk 3 is rotten")))


def refuse_piece_but_end(channel: VaultChannel, get: Get, payload: bytes) -> None:
    data = requested_bytes(get, payload)
    channel.send(Data(bytes=len(data)))
    channel.send_bulk([memoryview(data)])
    channel.send_piece_status(False)
    channel.send(DataEnd(digests=b""))


FAILURES = {
    "wrong digest": (wrong_digest, True, "have the wrong digest"),
    "no digests": (no_digests, True, "have the wrong digest"),
    "close_halfway": (close_halfway, False, "closed the connection"),
    "announces more": (announce_wrong_size(1), False, "instead of the requested"),
    "announces less": (announce_wrong_size(-1), False, "instead of the requested"),
    "rotten on the way": (refuse_while_sending, True, "rotten"),
    "contradicts itself": (refuse_piece_but_end, False, "sent contradictory status"),
    "not there": (refuse(NotFound("no such version")), False, "no such version"),
    "does not understand": (refuse(MalformedMessage("unknown request")), False, "unknown request"),
}


@pytest.mark.promise("restored-is-whole")
@pytest.mark.parametrize("case_name", FAILURES)
def test_failed_transfer_fails_only_its_slot(case_name: str) -> None:
    act, corrupt, reason_text = FAILURES[case_name]
    bad, good = slot("n2"), slot("n3", 1)
    lost, lost_batches = planned([(0, 4 * BATCH)], bad)
    targets, batches = planned([(0, 4 * BATCH)], good)
    with fake_vault_client({0: PAYLOAD, 1: PAYLOAD}, {"n2": [serve_like_a_vault, act]}) as vault:
        streams = received(vault, lost_batches + batches)
        (failure,) = streams.failures
        assert failure.slot is bad
        assert failure.is_corrupt is corrupt
        assert reason_text in failure.reason
        assert [batch.slot.node for batch in streams.landed] == ["n2", "n3", "n3", "n3", "n3"]
        doubted = isinstance(failure, BadTransfer)
        assert sum(node == "n2" for node, _ in vault.requests) == 2 + doubted
        assert vault.broken == ([("n2", failure.reason)] if case_name == "close_halfway" else [])
    assert bytes_of(targets) == [PAYLOAD[: 4 * BATCH]]
    assert lost[0][:BATCH].numpy().tobytes() == PAYLOAD[:BATCH]


def close_at_once(channel: VaultChannel, get: Get, payload: bytes) -> None:
    channel.close()


ROTTEN, GONE = DigestMismatch("chunk 3 is rotten"), NotFound("it was overwritten")

RECHECKS: dict[str, tuple[list[Behaviour], bool, bool]] = {
    "is right at the holder": ([wrong_digest, serve_like_a_vault], True, True),
    "comes wrong again": ([wrong_digest, wrong_digest], True, True),
    "is refused as malformed": ([wrong_digest, refuse(MalformedMessage("unknown request"))], True, True),
    "does not come again": ([wrong_digest, close_at_once], True, True),
    "is wrong at the holder": ([wrong_digest, refuse(ROTTEN)], False, True),
    "is found wrong while sent": ([wrong_digest, refuse_while_sending], False, True),
    "is overwritten": ([wrong_digest, refuse(GONE)], False, False),
}


@pytest.mark.promise("restored-is-whole")
@pytest.mark.parametrize("case", RECHECKS)
def test_corrupt_transfer_is_rejected_and_rechecked_at_holder(case: str) -> None:
    acts, blamed_on_the_way, corrupt = RECHECKS[case]
    hashed: list[bool] = []

    def recorded(act: Behaviour) -> Behaviour:
        def record(channel: VaultChannel, get: Get, payload: bytes) -> None:
            hashed.append(not get.skip_hash)
            act(channel, get, payload)

        return record

    _, batches = planned([(0, 2 * BATCH)])
    with fake_vault_client({0: PAYLOAD}, {"n2": [recorded(act) for act in acts]}) as vault:
        streams = received(vault, batches)
    (failure,) = streams.failures
    assert hashed == [False, True]
    assert streams.landed == []
    assert isinstance(failure, BadTransfer) is blamed_on_the_way
    assert failure.is_corrupt is corrupt


def test_stalled_holder_is_given_up() -> None:
    still = threading.Event()

    def stall(channel: VaultChannel, get: Get, payload: bytes) -> None:
        channel.send(Data(bytes=BATCH))
        channel.send_bulk([memoryview(payload)[: BLOCK + 7]])
        assert still.wait(DEADLINE_S)

    _, batches = planned([(0, BATCH)])
    with fake_vault_client({0: PAYLOAD}, {"n2": [stall]}, io_timeout_s=0.05) as vault:
        (failure,) = received(vault, batches).failures
        still.set()
    assert "sent nothing for 0.05 s" in failure.reason
    assert not failure.is_corrupt


def test_unreachable_holder_fails_its_slot() -> None:
    _, batches = planned([(0, 2 * BATCH)])
    with fake_vault_client({0: PAYLOAD}) as vault:
        vault.unavailable.add("n2")
        (failure,) = received(vault, batches).failures
    assert failure.reason == "n2 is unreachable"


def test_nothing_is_written_after_an_abandoned_restore() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pause(channel: VaultChannel, get: Get, payload: bytes) -> None:
        channel.send(Data(bytes=BATCH))
        channel.send_bulk([memoryview(payload)[:BLOCK]])
        begun.set()
        assert go_on.wait(DEADLINE_S)
        channel.send_bulk([memoryview(payload)[BLOCK:BATCH]])

    targets, batches = planned([(0, 2 * BATCH)])
    with fake_vault_client({0: PAYLOAD}, {"n2": [pause]}) as vault:
        stand_in: Any = vault
        streams = SlotStreams(stand_in, "job", batches)
        streams.start()
        assert begun.wait(DEADLINE_S)
        streams.close()
        targets[0].fill_(7)
        go_on.set()
        streams.finish()
        assert len(vault.requests) == 1
    assert bool((targets[0] == 7).all())
