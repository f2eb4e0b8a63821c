"""A fake of the trainer's vault client, whose connections lead to fake holders with any behaviour."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import xxhash

from everstep.errors import EverstepError, Unavailable
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import Data, DataEnd, Get, refused_from_error
from everstep_trainer.slots.vault_client import VaultConnection

Ranges = Sequence[tuple[int, int]]
Behaviour = Callable[[VaultChannel, Get, bytes], None]
DEADLINE_S = 60.0


def serve_like_a_vault(channel: VaultChannel, get: Get, payload: bytes) -> None:
    """Serve a request as a vault does."""
    digests = b"".join(xxhash.xxh3_128_digest(payload[at : at + length]) for at, length in get.ranges)
    serve(channel, requested_bytes(get, payload), digests)


def requested_bytes(get: Get, payload: bytes) -> bytes:
    """Return the bytes of the payload in the requested ranges."""
    return b"".join(payload[at : at + length] for at, length in get.ranges)


def serve(channel: VaultChannel, data: bytes, digests: bytes) -> None:
    """Send these bytes with those digests."""
    channel.send(Data(bytes=len(data)))
    for at in range(0, len(data), CHUNK_BYTES):
        channel.send_bulk([memoryview(data)[at : at + CHUNK_BYTES]])
        channel.send_piece_status(True)
    channel.send(DataEnd(digests=digests))


def refuse(error: EverstepError) -> Behaviour:
    """Return the behaviour of a holder that refuses a request with this error."""
    return lambda channel, _get, _payload: channel.send(refused_from_error(error))


class FakeVaultClient:
    """Open connections as everstep_trainer.slots.vault_client.VaultClient does, to threads of this process.

    Args:
        payloads: The payload of each rank.
        behaviours: Behaviours of the holders on these nodes, one for each request in turn. All other requests are
            served as by a vault.
        io_timeout_s: The timeout of the connections.
    """

    def __init__(
        self,
        payloads: dict[int, bytes],
        behaviours: dict[str, list[Behaviour]] | None = None,
        io_timeout_s: float = DEADLINE_S,
    ) -> None:
        self.payloads = payloads
        self.behaviours = behaviours or {}
        self.io_timeout_s = io_timeout_s
        self.requests: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        self.connected: list[str] = []
        self.broken: list[tuple[str, str]] = []
        self.unavailable: set[str] = set()
        self._ends: list[VaultChannel] = []
        self._threads: list[threading.Thread] = []

    def connect(self, *, job: str, node: str) -> Future[VaultConnection]:
        answer: Future[VaultConnection] = Future()
        if node in self.unavailable:
            answer.set_exception(Unavailable(f"{node} is unreachable"))
            return answer
        self.connected.append(node)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            channel = VaultChannel(listener.accept()[0], "the rank", DEADLINE_S)
        self._ends.append(channel)
        thread = threading.Thread(target=self._hold, args=(node, channel), daemon=True)
        self._threads.append(thread)
        thread.start()
        answer.set_result(VaultConnection(sock, DEADLINE_S, self.io_timeout_s))
        return answer

    def report_broken_connection(self, *, job: str, node: str, reason: str) -> None:
        self.broken.append((node, reason))

    def _hold(self, node: str, channel: VaultChannel) -> None:
        try:
            while True:
                get = channel.receive_request()
                assert isinstance(get, Get)
                self.requests.append((node, get.ranges))
                behaviours = self.behaviours.get(node)
                behaviour = behaviours.pop(0) if behaviours else serve_like_a_vault
                behaviour(channel, get, self.payloads[get.rank])
        except Unavailable:
            pass  # the rank or the test has closed the connection
        finally:
            channel.close()

    def close(self) -> None:
        for channel in self._ends:
            channel.shutdown()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@contextmanager
def fake_vault_client(
    payloads: dict[int, bytes], behaviours: dict[str, list[Behaviour]] | None = None, io_timeout_s: float = DEADLINE_S
) -> Iterator[FakeVaultClient]:
    """Yield a fake vault client, and end its holders with the block."""
    vault = FakeVaultClient(payloads, behaviours, io_timeout_s)
    try:
        yield vault
    finally:
        vault.close()
