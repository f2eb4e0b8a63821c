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
from dataclasses import dataclass
from typing import TypeVar

from everstep.clock import Backoff, Clock
from everstep.errors import AuthenticationError, MalformedMessage, NotFound, Unavailable
from everstep.ids import Version, split_address
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VAULT_SUPPORTED_VERSIONS, VaultChannel, connect, negotiate
from everstep.wire.v1 import transfer as wire
from everstep.wire.v1.training import PeerConnectionLost
from everstep_agent.vault.job_table import JobConfig, JobTable
from everstep_agent.vault.settings import VaultSettings

# Peer loss: report a peer when a connection broke and its vault accepts no other. A connection ends for many reasons (a
# job that is over, a cancelled copy), so each break is checked by a new connection first. Both sides notice.

log = logging.getLogger(__name__)

MIN_CHECK_INTERVAL_S = 1.0
"""Seconds in which only the first broken connection per peer is checked; each rank has its own connections."""

CHECK_DELAYS_S = (0.0, 0.05)
"""Seconds to wait before each check: a process being killed may still accept a connection at first."""

CHECK_TIMEOUT_S = 0.3
"""Seconds to connect. A machine on the same network accepts within milliseconds; a dead one does not answer."""


@dataclass(eq=False)
class PeerLossDetector:
    """Check and report lost peers. Safe to use from any thread; ``on_peer_lost`` runs in a thread of its own."""

    _node: str
    _job_table: JobTable
    _clock: Clock
    _on_peer_lost: Callable[[PeerConnectionLost], None]

    def __post_init__(self) -> None:
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
            try:
                socket.create_connection(address, CHECK_TIMEOUT_S).close()
            except OSError as error:
                self._report_lost(job, peer, f"{reason}; then: {error}")
                return

    def _report_lost(self, job: str, peer: str, detail: str) -> None:
        with self._lock:
            if self._closed:
                return
        trace = uuid.uuid4().hex[:16]
        lost = PeerConnectionLost(job=job, at=self._clock.wall(), trace=trace, peer=peer, detail=detail[:1000])
        context = {"node": self._node, "job": job, "trace": lost.trace}
        log.warning("the vault of %s is unreachable: %s", peer, detail, extra=context)
        self._on_peer_lost(lost)


# Handshake: both sides of the mutual challenge that begins every connection between vaults.


def client_handshake(
    channel: VaultChannel, job: str, secret: bytes, node: str, peer_node: str, *, read_only: bool = False
) -> None:
    """Run the client's side, as ``node``. Raises AuthenticationError if the peer does not prove to be ``peer_node``."""
    greeting = wire.Greeting(
        protocols=VAULT_SUPPORTED_VERSIONS,
        job=job,
        node=node,
        peer=peer_node,
        nonce=secrets.token_bytes(wire.NONCE_BYTES),
        read_only=read_only,
    )
    channel.send(greeting)
    challenge = _receive_opening_answer(channel)
    if not isinstance(challenge, wire.Challenge):
        raise MalformedMessage(f"{channel.peer} answered a greeting with {type(challenge).__name__}")
    negotiate([challenge.protocol], VAULT_SUPPORTED_VERSIONS)
    channel.send(wire.Proof(mac=wire.make_proof(secret, "client", greeting, challenge)))
    answer = _receive_opening_answer(channel)
    if not (isinstance(answer, wire.Proof) and wire.is_valid_proof(answer.mac, secret, "server", greeting, challenge)):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {job}, or is not {peer_node}")


def _receive_opening_answer(channel: VaultChannel) -> wire.OpeningAnswer:
    """Return the server's answer in a handshake. Raises its refusal."""
    answer = channel.receive_opening_answer()
    if isinstance(answer, wire.TransferRefused):
        raise wire.error_from_refused(answer, channel.peer)
    return answer


def server_handshake(channel: VaultChannel, job_table: JobTable, node: str) -> tuple[JobConfig, wire.Greeting]:
    """Run the server's side, as ``node``; return the connection's job and the client's greeting."""
    greeting = channel.receive_opening()
    if not isinstance(greeting, wire.Greeting):
        raise MalformedMessage(f"{channel.peer} sent {type(greeting).__name__} instead of a greeting")
    if greeting.peer != node:
        raise AuthenticationError(f"{greeting.node} wants to connect to {greeting.peer}, but this node is {node}")
    protocol = negotiate(greeting.protocols, VAULT_SUPPORTED_VERSIONS)
    challenge = wire.Challenge(protocol=protocol, nonce=secrets.token_bytes(wire.NONCE_BYTES))
    job_config = job_table.get_config(greeting.job)
    secret = job_config.secret
    channel.send(challenge)
    proof = channel.receive_opening()
    if not (isinstance(proof, wire.Proof) and wire.is_valid_proof(proof.mac, secret, "client", greeting, challenge)):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {greeting.job}")
    channel.send(wire.Proof(mac=wire.make_proof(secret, "server", greeting, challenge)))
    return job_config, greeting


# Bulk reads: a slot's manifest, or bytes of its payload, from a peer. Callers hash them, since only they know the
# digest. All raise the peer's refusal, or MalformedMessage.


def fetch_manifest(
    channel: VaultChannel, settings: VaultSettings, rank: int, version: Version, *, parity: bool = False
) -> bytes:
    """Return the unchecked manifest that ``rank`` (with ``parity``, the group of that number) sealed as ``version``."""
    length = request_bulk(channel, settings, wire.Get(rank=rank, version=version, ranges=(), parity=parity))
    if length > MAX_MANIFEST_BYTES:
        raise MalformedMessage(
            f"{channel.peer} announced a manifest of {length} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    return receive_bulk(channel, length)


def fetch_inventory(channel: VaultChannel) -> wire.InventoryList:
    """Return the peer's checked slots of the connection's job."""
    channel.send(wire.InventoryRequest())
    return channel.receive_answer(wire.InventoryList)


def fetch_bytes(
    channel: VaultChannel, settings: VaultSettings, rank: int, version: Version, ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Return joined (offset, length) ranges of the payload that ``rank`` sealed as ``version``, hashed there."""
    announced = request_bulk(channel, settings, wire.Get(rank=rank, version=version, ranges=tuple(ranges)))
    wanted = sum(length for _, length in ranges)
    if announced != wanted:
        raise MalformedMessage(f"{channel.peer} announced {announced} bytes instead of {wanted}")
    return receive_bulk(channel, wanted)


def request_bulk(channel: VaultChannel, settings: VaultSettings, get: wire.Get) -> int:
    """Request bytes, and return their announced number."""
    channel.send(get)
    channel.set_receive_timeout(settings.request_timeout_s)
    announced = channel.receive_answer(wire.Data).bytes
    channel.set_receive_timeout(settings.io_timeout_s)
    return announced


def receive_bulk(channel: VaultChannel, length: int) -> bytes:
    found = bytearray(length)
    for start in range(0, length, CHUNK_BYTES):
        channel.receive_into(memoryview(found)[start : start + CHUNK_BYTES])
        channel.require_good_piece()
    channel.receive_answer(wire.DataEnd)
    return bytes(found)


T = TypeVar("T")
PoolKey = tuple[str, str, str, bytes]

_HANDSHAKE_BACKOFF = Backoff(floor_s=0.01, ceiling_s=0.1)


@dataclass(eq=False)
class PeerPool:
    """A pool of connections by job, node, address and secret. Safe to use from any thread."""

    _settings: VaultSettings
    _job_table: JobTable
    _clock: Clock
    _peer_loss_detector: PeerLossDetector

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: defaultdict[PoolKey, list[VaultChannel]] = defaultdict(list)
        self._busy: set[VaultChannel] = set()
        self._stopping = threading.Event()

    def call(self, job: str, node: str, action: Callable[[VaultChannel], T], timeout_s: float | None = None) -> T:
        """Run ``action`` over a connection to ``node``'s vault; twice if a pooled one is dead. Raises EverstepError."""
        key = self._key(job, node)
        pooled = self._take(key)
        if pooled is not None:
            try:
                return self._run_action(key, pooled, action, timeout_s)
            except Unavailable:
                self._close_idle(lambda other: other == key)
        return self._run_action(key, self._connect_with_retry(key, timeout_s), action, timeout_s)

    def open_channel(self, job: str, node: str) -> VaultChannel:
        """Return a new read-only connection to ``node``'s vault, owned by the caller. Raises EverstepError."""
        channel = self._connect_with_retry(self._key(job, node), None, read_only=True)
        with self._lock:
            self._busy.discard(channel)
        return channel

    def _key(self, job: str, node: str) -> PoolKey:
        job_config = self._job_table.get_config(job)
        return job, node, job_config.address(node), job_config.secret

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

    def _connect_with_retry(self, key: PoolKey, timeout_s: float | None, *, read_only: bool = False) -> VaultChannel:
        """Return an authenticated connection; retry for a while if the node does not know the job yet."""
        retry_s = self._settings.unknown_job_retry_s
        deadline = self._clock.monotonic() + (retry_s if timeout_s is None else min(timeout_s, retry_s))
        attempt = 0
        while True:
            try:
                return self._connect(key, timeout_s or self._settings.io_timeout_s, read_only)
            except NotFound:
                pause_s = _HANDSHAKE_BACKOFF.delay_s(attempt, 0.5)
                if self._clock.monotonic() + pause_s > deadline or self._stopping.wait(pause_s):
                    raise
                attempt += 1

    def _connect(self, key: PoolKey, wait_s: float, read_only: bool) -> VaultChannel:
        settings, (job, node, address, secret) = self._settings, key
        channel = connect(address, node, min(wait_s, settings.connect_timeout_s), settings.io_timeout_s)
        with self._lock:
            self._busy.add(channel)
        try:
            channel.set_receive_timeout(wait_s)
            client_handshake(channel, job, secret, settings.node, node, read_only=read_only)
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
