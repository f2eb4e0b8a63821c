"""Pool authenticated connections to other nodes' vaults."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from everstep.clock import Backoff, Clock
from everstep.errors import AuthenticationError, MalformedMessage, NotFound, Unavailable
from everstep.ids import Version, split_address
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VAULT_SUPPORTED_VERSIONS, VaultChannel, connect, negotiate
from everstep.wire.v1.training import PeerConnectionLost
from everstep.wire.v1.transfer import (
    NONCE_BYTES,
    Challenge,
    Data,
    DataEnd,
    Get,
    Greeting,
    InventoryList,
    InventoryRequest,
    Proof,
    TransferRefused,
    error_from_refused,
    is_valid_proof,
    make_proof,
)
from everstep_agent.vault.job_table import JobConfig, JobTable
from everstep_agent.vault.settings import VaultSettings

# Peer loss: report a peer when a connection broke and its vault accepts no other.
#
# A connection ends for many reasons (a job that is over, a cancelled copy), so each break is checked by a new
# connection before it is reported. Both sides notice, the one that copies and the one that is copied to.

log = logging.getLogger(__name__)

MIN_CHECK_INTERVAL_S = 1.0
"""Seconds in which only the first broken connection per peer is checked; each rank has its own connections."""

CHECK_DELAYS_S = (0.0, 0.05)
"""Seconds to wait before each check: a process being killed may still accept a connection at first."""

CHECK_TIMEOUT_S = 0.3
"""Seconds to connect. A machine on the same network accepts within milliseconds; a dead one does not answer."""


class PeerLossDetector:
    """Check and report lost peers. Safe to use from any thread; ``on_peer_lost`` runs in a thread of its own."""

    def __init__(
        self, node: str, job_table: JobTable, clock: Clock, on_peer_lost: Callable[[PeerConnectionLost], None]
    ) -> None:
        self._node = node
        self._job_table = job_table
        self._clock = clock
        self._on_peer_lost = on_peer_lost
        self._lock = threading.Lock()
        self._checked_at: dict[str, float] = {}
        self._closed = False

    def report_broken_connection(self, job: str, peer: str, reason: str) -> None:
        """Check a peer after an authenticated connection of ``job`` ended unexpectedly."""
        now = self._clock.monotonic()
        with self._lock:
            if self._closed or now < self._checked_at.get(peer, -MIN_CHECK_INTERVAL_S) + MIN_CHECK_INTERVAL_S:
                return
            self._checked_at[peer] = now
        threading.Thread(target=self._check_peer, args=(job, peer, reason), name="witness", daemon=True).start()

    def close(self) -> None:
        """Stop reporting, because the connections now end by our own doing."""
        with self._lock:
            self._closed = True

    def _check_peer(self, job: str, peer: str, reason: str) -> None:
        try:
            address = split_address(self._job_table.get_config(job).address(peer))
        except NotFound:
            return  # the job is over, or has no holder on that node any more
        for pause_s in CHECK_DELAYS_S:
            time.sleep(pause_s)
            refusal = _connect_error(address)
            if refusal:
                self._report_lost(job, peer, f"{reason}; then: {refusal}")
                return

    def _report_lost(self, job: str, peer: str, detail: str) -> None:
        with self._lock:
            if self._closed:
                return
        lost = PeerConnectionLost(
            job=job, at=self._clock.wall(), trace=uuid.uuid4().hex[:16], peer=peer, detail=detail[:1000]
        )
        context = {"node": self._node, "job": job, "trace": lost.trace}
        log.warning("the vault of %s is unreachable: %s", peer, detail, extra=context)
        self._on_peer_lost(lost)


def _connect_error(address: tuple[str, int]) -> str:
    """Return why the address accepts no connection; "" if it does."""
    try:
        socket.create_connection(address, CHECK_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


# Handshake: both sides of the mutual challenge that begins every connection between vaults.


def client_handshake(
    channel: VaultChannel, job_config: JobConfig, node: str, peer_node: str, *, read_only: bool = False
) -> None:
    """Run the client's side, as ``node``. Raises AuthenticationError if the peer does not prove to be ``peer_node``."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    greeting = Greeting(
        protocols=VAULT_SUPPORTED_VERSIONS,
        job=job_config.job,
        node=node,
        peer=peer_node,
        nonce=nonce,
        read_only=read_only,
    )
    channel.send(greeting)
    challenge = channel.receive_opening_answer()
    if isinstance(challenge, TransferRefused):
        raise error_from_refused(challenge, channel.peer)
    if not isinstance(challenge, Challenge):
        raise MalformedMessage(f"{channel.peer} answered a greeting with {type(challenge).__name__}")
    negotiate([challenge.protocol], VAULT_SUPPORTED_VERSIONS)
    channel.send(Proof(mac=make_proof(job_config.secret, "client", greeting, challenge)))
    answer = channel.receive_opening_answer()
    if isinstance(answer, TransferRefused):
        raise error_from_refused(answer, channel.peer)
    if not isinstance(answer, Proof) or not is_valid_proof(
        answer.mac, job_config.secret, "server", greeting, challenge
    ):
        raise AuthenticationError(
            f"{channel.peer} does not know the secret of job {job_config.job}, or is not {peer_node}"
        )


def server_handshake(channel: VaultChannel, job_table: JobTable, node: str) -> tuple[JobConfig, Greeting]:
    """Run the server's side, as ``node``; return the connection's job and the client's greeting.

    Raises NotFound, AuthenticationError, VersionMismatch, MalformedMessage.
    """
    greeting = channel.receive_opening()
    if not isinstance(greeting, Greeting):
        raise MalformedMessage(f"{channel.peer} sent {type(greeting).__name__} instead of a greeting")
    if greeting.peer != node:
        raise AuthenticationError(f"{greeting.node} wants to connect to {greeting.peer}, but this node is {node}")
    challenge = Challenge(
        protocol=negotiate(greeting.protocols, VAULT_SUPPORTED_VERSIONS), nonce=secrets.token_bytes(NONCE_BYTES)
    )
    job_config = job_table.get_config(greeting.job)
    channel.send(challenge)
    proof = channel.receive_opening()
    if not isinstance(proof, Proof) or not is_valid_proof(proof.mac, job_config.secret, "client", greeting, challenge):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {greeting.job}")
    channel.send(Proof(mac=make_proof(job_config.secret, "server", greeting, challenge)))
    return job_config, greeting


# Bulk reads: a slot's manifest, or bytes of its payload, from a peer. Callers hash them, since only they know the
# digest.


def fetch_manifest(
    channel: VaultChannel, settings: VaultSettings, rank: int, version: Version, *, parity: bool = False
) -> bytes:
    """Return the unchecked manifest that ``rank`` (with ``parity``, the group of that number) sealed as ``version``.

    Raises EverstepError, MalformedMessage.
    """
    channel.send(Get(rank=rank, version=version, ranges=(), parity=parity))
    channel.set_receive_timeout(settings.request_timeout_s)
    length = channel.receive_answer(Data).bytes
    if length > MAX_MANIFEST_BYTES:
        raise MalformedMessage(
            f"{channel.peer} announced a manifest of {length} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    channel.set_receive_timeout(settings.io_timeout_s)
    return receive_bulk(channel, length)


def fetch_inventory(channel: VaultChannel) -> InventoryList:
    """Return the peer's checked slots of the connection's job. Raises the peer's refusal."""
    channel.send(InventoryRequest())
    return channel.receive_answer(InventoryList)


def fetch_bytes(
    channel: VaultChannel, settings: VaultSettings, rank: int, version: Version, ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Return the (offset, length) ranges of the payload that ``rank`` sealed as ``version``, joined.

    The peer hashes before it answers.

    Raises EverstepError, MalformedMessage.
    """
    channel.send(Get(rank=rank, version=version, ranges=tuple(ranges)))
    channel.set_receive_timeout(settings.request_timeout_s)
    announced, wanted = channel.receive_answer(Data).bytes, sum(length for _, length in ranges)
    if announced != wanted:
        raise MalformedMessage(f"{channel.peer} announced {announced} bytes instead of {wanted}")
    channel.set_receive_timeout(settings.io_timeout_s)
    return receive_bulk(channel, wanted)


def receive_bulk(channel: VaultChannel, length: int) -> bytes:
    """Receive announced bulk bytes. Raises the peer's reason if it breaks off."""
    found = bytearray(length)
    for start in range(0, length, CHUNK_BYTES):
        channel.receive_into(memoryview(found)[start : start + CHUNK_BYTES])
        if not channel.receive_piece_status():
            channel.receive_answer(DataEnd)  # raises the peer's refusal
            raise MalformedMessage(f"{channel.peer} sent contradictory status: slot refilled, then not refilled")
    channel.receive_answer(DataEnd)
    return bytes(found)


T = TypeVar("T")
PoolKey = tuple[str, str, str, bytes]

_HANDSHAKE_BACKOFF = Backoff(floor_s=0.01, ceiling_s=0.1)


class PeerPool:
    """A pool of connections by job, node, address and secret. Safe to use from any thread."""

    def __init__(
        self, settings: VaultSettings, job_table: JobTable, clock: Clock, peer_loss_detector: PeerLossDetector
    ) -> None:
        self._settings = settings
        self._job_table = job_table
        self._clock = clock
        self._peer_loss_detector = peer_loss_detector
        self._lock = threading.Lock()
        self._idle: defaultdict[PoolKey, list[VaultChannel]] = defaultdict(list)
        self._busy: set[VaultChannel] = set()
        self._stopping = threading.Event()

    def call(self, job: str, node: str, action: Callable[[VaultChannel], T], timeout_s: float | None = None) -> T:
        """Run ``action`` over a connection to ``node``'s vault, a pooled one if possible.

        Actions must tolerate being run twice: a pooled connection that proves dead is replaced by a new one.

        Args:
            timeout_s: Limits each wait of this call, instead of the settings' time-outs.

        Raises NotFound, Unavailable, AuthenticationError, EverstepError.
        """
        job_config = self._job_table.get_config(job)
        key = (job, node, job_config.address(node), job_config.secret)
        pooled = self._take(key)
        if pooled is not None:
            try:
                return self._run_action(key, pooled, action, timeout_s)
            except Unavailable:
                self._close_idle_for(key)
        return self._run_action(key, self._connect_with_retry(job_config, node, key, timeout_s), action, timeout_s)

    def open_channel(self, job: str, node: str) -> VaultChannel:
        """Return a new read-only connection to ``node``'s vault, owned by the caller. Raises what ``call`` does."""
        job_config = self._job_table.get_config(job)
        key = (job, node, job_config.address(node), job_config.secret)
        channel = self._connect_with_retry(job_config, node, key, None, read_only=True)
        with self._lock:
            self._busy.discard(channel)
        return channel

    def _take(self, key: PoolKey) -> VaultChannel | None:
        with self._lock:
            channels = self._idle.get(key)
            if not channels:
                return None
            channel = channels.pop()
            self._busy.add(channel)
            return channel

    def _run_action(
        self, key: PoolKey, channel: VaultChannel, action: Callable[[VaultChannel], T], timeout_s: float | None
    ) -> T:
        channel.set_receive_timeout(timeout_s or self._settings.io_timeout_s)
        try:
            result = action(channel)
        except BaseException as error:
            self._discard(channel)
            if isinstance(error, Unavailable):
                self._peer_loss_detector.report_broken_connection(key[0], key[1], str(error))
            raise
        with self._lock:
            self._busy.discard(channel)
            keep = not self._stopping.is_set()
            if keep:
                self._idle[key].append(channel)
        if not keep:
            channel.close()
        return result

    def _discard(self, channel: VaultChannel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()

    def _close_idle_for(self, key: PoolKey) -> None:
        with self._lock:
            dead = self._idle.pop(key, [])
        for channel in dead:
            channel.close()

    def _connect_with_retry(
        self, job_config: JobConfig, node: str, key: PoolKey, timeout_s: float | None, *, read_only: bool = False
    ) -> VaultChannel:
        """Return an authenticated connection; retry for a while if the node does not know the job yet."""
        deadline = self._clock.monotonic() + (
            self._settings.unknown_job_retry_s
            if timeout_s is None
            else min(timeout_s, self._settings.unknown_job_retry_s)
        )
        attempt = 0
        while True:
            try:
                return self._connect(job_config, node, key[2], timeout_s, read_only)
            except NotFound:
                pause_s = _HANDSHAKE_BACKOFF.delay_s(attempt, 0.5)
                if self._clock.monotonic() + pause_s > deadline or self._stopping.wait(pause_s):
                    raise
                attempt += 1

    def _connect(
        self, job_config: JobConfig, node: str, address: str, timeout_s: float | None, read_only: bool
    ) -> VaultChannel:
        settings = self._settings
        wait_s = timeout_s or settings.io_timeout_s
        channel = connect(address, node, min(wait_s, settings.connect_timeout_s), settings.io_timeout_s)
        with self._lock:
            self._busy.add(channel)
        try:
            channel.set_receive_timeout(wait_s)
            client_handshake(channel, job_config, settings.node, node, read_only=read_only)
        except BaseException:
            self._discard(channel)
            raise
        return channel

    def close_outdated(self, job_config: JobConfig) -> None:
        """Close the job's idle connections to former holders, addresses or secrets."""
        here = {(job_config.job, node, address, job_config.secret) for node, address in job_config.holders.items()}
        self._close_idle(lambda key: key[0] == job_config.job and key not in here)

    def forget_job(self, job: str) -> None:
        """Close the idle connections of a job that is over."""
        self._close_idle(lambda key: key[0] == job)

    def _close_idle(self, chosen: Callable[[PoolKey], bool]) -> None:
        with self._lock:
            dead = [channel for key in list(self._idle) if chosen(key) for channel in self._idle.pop(key)]
        for channel in dead:
            channel.close()

    def close(self) -> None:
        """End all connections; their users get Unavailable."""
        self._stopping.set()
        with self._lock:
            channels = [*self._busy, *(c for pooled in self._idle.values() for c in pooled)]
            self._idle.clear()
        for channel in channels:
            channel.shutdown()

    def __len__(self) -> int:
        with self._lock:
            return len(self._busy) + sum(map(len, self._idle.values()))
