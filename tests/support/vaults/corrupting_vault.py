"""A fake vault that knows the job's secret and lists the digests of sealed slots, but sends other bytes."""

from __future__ import annotations

import socket
import threading

import xxhash

from everstep.errors import Unavailable
from everstep.layout.slots import chunk_digests
from everstep.wire.framing import VaultChannel
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import Data, DataEnd, Digests, DigestsRequest, Get, TransferRequest
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.transfer.peers import server_handshake
from tests.support.vaults.vault_process import DEADLINE_S, JOB, SECRET

MANIFEST = b"m"


class CorruptingVault:
    """Serve as the vault of n2 in `vault_process.Vaults` until it is closed.

    Args:
        payload: The payload whose digests it lists. It sends zeros.
        manifest: The manifest that it sends instead of MANIFEST, whose digest it lists.
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
        table = JobTable()
        table.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=()))
        try:
            server_handshake(channel, table, "n2")
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
        data = bytes(request.ranges[0][1]) if request.ranges else self._manifest
        channel.send(Data(bytes=len(data)))
        channel.send_bulk([memoryview(data)])
        channel.send_piece_status(True)
        channel.send(DataEnd(digests=xxhash.xxh3_128_digest(data)))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(DEADLINE_S)
        for channel in self._channels:
            channel.shutdown()
        for thread in self._threads[1:]:
            thread.join(DEADLINE_S)
