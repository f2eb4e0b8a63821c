"""Bytes that are not sent again: those of other versions, and those received before a connection broke."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.clock import Clock
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.wire.v1.transfer import Ready, chunk_bitmap
from everstep_agent.vault.transfer.sending import BURST_S, PACED_PIECE_BYTES, OutgoingTransfer, RateLimiter
from tests.support.vaults.vault_process import RankMemory, VaultClient, VaultProcess, Vaults, map_segment, noise

CHUNKS = 12
SIZE = CHUNKS * CHUNK_BYTES


def counters(client: VaultClient) -> dict[str, int]:
    return client.statistics().counters


def copy_at(client: VaultClient, version: Version) -> bytes:
    """Return the payload of a copy once it has the right hash."""
    answer = client.inventory()
    (slot,) = [slot for slot in answer.slots if slot.version == version]
    view = map_segment(Path(slot.path))
    view.verify(slot.slot)
    return bytes(view.payload(slot.slot))


def test_only_changed_chunks_are_sent(fleet: Vaults) -> None:
    fleet.start("n1", "--scrub-interval-s", "0"), fleet.start("n2", "--scrub-interval-s", "0")
    clients = fleet.configure()
    size = 3 * CHUNK_BYTES + 1000
    rank = RankMemory(fleet.all[0].client(), rank=0, slot_bytes=slot_bytes_for(64, size))
    first = noise(size)
    rank.fill(0, Version(1, 1), first)
    assert rank.replicated(0, Version(1, 1), ["n2"]).nodes == ("n2",)
    assert counters(clients["n2"])["reused_bytes"] == 0
    second = bytearray(first)
    second[CHUNK_BYTES + 5] ^= 1
    rank.fill(1, Version(1, 2), bytes(second))
    assert rank.replicated(1, Version(1, 2), ["n2"]).nodes == ("n2",)
    assert copy_at(clients["n2"], Version(1, 2)) == second
    assert counters(clients["n2"])["reused_bytes"] == 2 * CHUNK_BYTES + 1000


def test_corrupt_chunk_of_an_older_copy_is_sent(fleet: Vaults) -> None:
    fleet.start("n1", "--scrub-interval-s", "0"), fleet.start("n2", "--scrub-interval-s", "0")
    clients = fleet.configure()
    size = 2 * CHUNK_BYTES
    rank = RankMemory(fleet.all[0].client(), rank=0, slot_bytes=slot_bytes_for(64, size))
    payload = noise(size)
    rank.fill(0, Version(1, 1), payload)
    assert rank.replicated(0, Version(1, 1), ["n2"]).nodes == ("n2",)
    answer = clients["n2"].inventory()
    view = map_segment(Path(answer.slots[0].path))
    view.payload(answer.slots[0].slot)[17] ^= 1
    rank.fill(1, Version(1, 2), payload)
    assert rank.replicated(1, Version(1, 2), ["n2"]).nodes == ("n2",)
    assert copy_at(clients["n2"], Version(1, 2)) == payload
    assert counters(clients["n2"])["reused_bytes"] == CHUNK_BYTES


class Breaker:
    """A proxy in front of a vault that cuts each of its first connections after some bytes."""

    def __init__(self, address: str, cut_after: list[int]) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._cut_after = cut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried: list[int] = []
        self.accepts = 1 << 62
        self._sockets: list[socket.socket] = [self._listener]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                if len(self.carried) >= self.accepts:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            self._sockets.append(server)
            left = self._cut_after.pop(0) if self._cut_after else 1 << 62
            self.carried.append(0)
            threading.Thread(
                target=self._carry, args=(client, server, left, len(self.carried) - 1), daemon=True
            ).start()
            threading.Thread(target=self._carry, args=(server, client, 1 << 62, None), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, left: int, number: int | None) -> None:
        try:
            while left > 0 and (data := source.recv(min(left, 1 << 18))):
                to.sendall(data)
                left -= len(data)
                if number is not None:
                    self.carried[number] += len(data)
        except OSError:
            pass
        for end in (source, to):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        if left <= 0:
            source.close()  # with bytes unread: the sender learns of it at once

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._accepting.join()
        for end in self._sockets:
            end.close()


@contextmanager
def broken_in_front_of(vault: VaultProcess, cut_after: list[int]) -> Iterator[Breaker]:
    """Make other vaults reach this one through a connection that breaks."""
    breaker, real = Breaker(vault.address, cut_after), vault.address
    vault.address = breaker.address
    try:
        yield breaker
    finally:
        vault.address = real
        breaker.close()


def test_transfer_resumes_where_its_connection_broke(fleet: Vaults) -> None:
    fleet.start("n1", "--streams", "1", "--scrub-interval-s", "0"), fleet.start("n2", "--scrub-interval-s", "0")
    cut = 10 * CHUNK_BYTES + CHUNK_BYTES // 2
    with broken_in_front_of(fleet.all[1], [cut]) as breaker:
        clients = fleet.configure()
        rank = RankMemory(fleet.all[0].client(), rank=0, slot_bytes=slot_bytes_for(64, SIZE))
        payload = bytearray(SIZE)
        payload[::CHUNK_BYTES] = bytes(range(CHUNKS))  # no two alike, so that none is taken from another
        rank.fill(0, Version(1, 1), bytes(payload))
        assert rank.replicated(0, Version(1, 1), ["n2"]).nodes == ("n2",)
        assert copy_at(clients["n2"], Version(1, 1)) == payload
        assert breaker.carried[0] == cut
        assert SIZE <= sum(breaker.carried) <= SIZE + CHUNK_BYTES  # no whole chunk twice
        assert counters(clients["n2"])["reused_bytes"] == 10 * CHUNK_BYTES


class AdvancingClock:
    """A clock that advances when it sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_pace_limits_the_total_bytes_sent() -> None:
    watch = AdvancingClock()
    clock: Clock = watch
    pace = RateLimiter(1e6, clock, watch.sleep)
    for _ in range(100):
        pace.acquire(100_000)
    assert watch.now - 100.0 == pytest.approx(10.0 - 0.1, abs=BURST_S)
    watch.now += 60.0  # a rest is no credit
    before = watch.now
    for _ in range(10):
        pace.acquire(100_000)
    assert watch.now - before >= 1.0 - 0.1 - BURST_S - 1e-9


def test_pace_without_a_bound_never_waits() -> None:
    watch = AdvancingClock()
    pace = RateLimiter(None, watch, watch.sleep)
    pace.acquire(1 << 60)
    assert watch.now == 100.0


class RecordingChannel:
    """A connection whose other end accepts everything. ``pieces``: the lengths of the sent pieces."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def send(self, message: object) -> None:
        pass

    def send_bulk(self, views: list[memoryview]) -> None:
        self.pieces += map(len, views)

    def send_piece_status(self, good: bool) -> None:
        assert good

    def receive_answer(self, kind: Any) -> Any:
        return kind()


def test_manifest_and_chunks_are_paced_in_small_pieces() -> None:
    watch, line = AdvancingClock(), RecordingChannel()
    reading: Any = SimpleNamespace(manifest=bytes(3_000_000), payload=memoryview(bytes(2 * CHUNK_BYTES + 5)))
    reading.is_unchanged = lambda: True
    ready = Ready(transfer=bytes(16), needs_manifest=True, present_chunks=chunk_bitmap([1]))
    outgoing = OutgoingTransfer(reading, ready, RateLimiter(1e6, watch, watch.sleep))
    channel: Any = line
    outgoing.send_manifest(channel)
    outgoing.send(channel)
    sent = sum(line.pieces)
    assert sent == 3_000_000 + CHUNK_BYTES + 5
    assert max(line.pieces) == PACED_PIECE_BYTES
    assert watch.now - 100.0 == pytest.approx((sent - line.pieces[-1]) / 1e6, abs=BURST_S)
