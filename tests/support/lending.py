"""A node's vault that lends connections, and the vault of a holder at their other end, which may do anything."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import xxhash
from everstep_trainer.memory_tier.vault_client import VaultConnection

from everstep.errors import EverstepError, Unavailable
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import Data, DataEnd, Get, refused_from_error

Ranges = Sequence[tuple[int, int]]
Act = Callable[[VaultChannel, Get, bytes], None]
DEADLINE_S = 60.0


def serve_well(channel: VaultChannel, get: Get, payload: bytes) -> None:
    """What a vault does."""
    digests = b"".join(xxhash.xxh3_128_digest(payload[at : at + length]) for at, length in get.ranges)
    serve(channel, wanted(get, payload), digests)


def wanted(get: Get, payload: bytes) -> bytes:
    return b"".join(payload[at : at + length] for at, length in get.ranges)


def serve(channel: VaultChannel, data: bytes, digests: bytes) -> None:
    """These bytes and those digests."""
    channel.send(Data(bytes=len(data)))
    for at in range(0, len(data), CHUNK_BYTES):
        channel.send_bulk([memoryview(data)[at : at + CHUNK_BYTES]])
        channel.send_piece_status(True)
    channel.send(DataEnd(digests=digests))


def refuse(error: EverstepError) -> Act:
    return lambda channel, _get, _payload: channel.send(refused_from_error(error))


class LendingVault:
    """Stands in for everstep_trainer.memory_tier.vault_client.VaultClient where connections are asked for.

    Args:
        payloads: of each rank.
        acts: what the holders of these nodes do with each request in turn; then, and at others, they serve well.
        io_timeout_s: what a borrower is told.
    """

    def __init__(
        self, payloads: dict[int, bytes], acts: dict[str, list[Act]] | None = None, io_timeout_s: float = DEADLINE_S
    ) -> None:
        self.payloads = payloads
        self.acts = acts or {}
        self.io_timeout_s = io_timeout_s
        self.asked: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        self.lent: list[str] = []
        self.broke: list[tuple[str, str]] = []
        self.away: set[str] = set()
        self._ends: list[VaultChannel] = []
        self._threads: list[threading.Thread] = []

    def connect(self, *, job: str, node: str) -> Future[VaultConnection]:
        answer: Future[VaultConnection] = Future()
        if node in self.away:
            answer.set_exception(Unavailable(f"{node} is away"))
            return answer
        self.lent.append(node)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            there = VaultChannel(listener.accept()[0], "the rank", DEADLINE_S)
        self._ends.append(there)
        thread = threading.Thread(target=self._hold, args=(node, there), daemon=True)
        self._threads.append(thread)
        thread.start()
        answer.set_result(VaultConnection(sock, DEADLINE_S, self.io_timeout_s))
        return answer

    def report_broken_connection(self, *, job: str, node: str, reason: str) -> None:
        self.broke.append((node, reason))

    def _hold(self, node: str, channel: VaultChannel) -> None:
        try:
            while True:
                get = channel.receive_request()
                assert isinstance(get, Get)
                self.asked.append((node, get.ranges))
                acts = self.acts.get(node)
                act = acts.pop(0) if acts else serve_well
                act(channel, get, self.payloads[get.rank])
        except Unavailable:
            pass  # the rank is done, or the test has ended the connection
        finally:
            channel.close()

    def close(self) -> None:
        for channel in self._ends:
            channel.shutdown()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@contextmanager
def lending(
    payloads: dict[int, bytes], acts: dict[str, list[Act]] | None = None, io_timeout_s: float = DEADLINE_S
) -> Iterator[LendingVault]:
    """A vault whose holders are gone with the block."""
    vault = LendingVault(payloads, acts, io_timeout_s)
    try:
        yield vault
    finally:
        vault.close()
