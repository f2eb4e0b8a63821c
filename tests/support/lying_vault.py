"""A vault that knows the job's secret, says what was sealed, and sends bytes that are something else."""

from __future__ import annotations

import socket
import threading

import xxhash
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.transfer.peers import server_handshake

from everstep.errors import Unavailable
from everstep.layout.slots import chunk_digests
from everstep.wire.framing import VaultChannel
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import Data, DataEnd, Digests, DigestsRequest, Get, TransferRequest
from tests.support.vaults import DEADLINE_S, JOB, SECRET

MANIFEST = b"m"


class LyingVault:
    """Stands in for the vault of n2 in tests.support.vaults.Vaults, and serves until it is closed.

    Args:
        payload: what it says was sealed; it sends zeros.
        manifest: what it sends as the manifest that was sealed, which is MANIFEST.
    """

    def __init__(self, payload: bytes, manifest: bytes = MANIFEST) -> None:
        self._payload = payload
        self._manifest = manifest
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._channels: list[VaultChannel] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            channel = VaultChannel(sock, "a vault", DEADLINE_S)
            self._channels.append(channel)
            self._threads.append(threading.Thread(target=self._serve, args=(channel,)))
            self._threads[-1].start()

    def _serve(self, channel: VaultChannel) -> None:
        book = JobTable()
        book.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=()))
        try:
            server_handshake(channel, book, "n2")
            while True:
                self._answer(channel, channel.receive_request())
        except Unavailable:
            channel.close()

    def _answer(self, channel: VaultChannel, request: TransferRequest) -> None:
        if isinstance(request, DigestsRequest):
            digests = [xxhash.xxh3_128_digest(MANIFEST), *chunk_digests(memoryview(self._payload))]
            channel.send(Digests(payload_bytes=len(self._payload), digests=b"".join(digests)))
            return
        assert isinstance(request, Get)
        lie = bytes(request.ranges[0][1]) if request.ranges else self._manifest
        length = len(lie)
        channel.send(Data(bytes=length))
        channel.send_bulk([memoryview(lie)])
        channel.send_piece_status(True)
        channel.send(DataEnd(digests=xxhash.xxh3_128_digest(lie)))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(DEADLINE_S)
        for channel in self._channels:
            channel.shutdown()
        for thread in self._threads[1:]:
            thread.join(DEADLINE_S)
