"""Connections to other nodes' vaults: proved once, then kept for the next request."""

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
from everstep.layout.manifests import MOST_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VAULTS_SPEAK, Channel, connect, negotiate
from everstep.wire.v1.training import PeerLost
from everstep.wire.v1.transfer import (
    NONCE_BYTES,
    Challenge,
    Data,
    DataEnd,
    Get,
    Greeting,
    Proof,
    Refused,
    prove,
    proves,
    refused_error,
)
from everstep_agent.vault.job_table import JobBook, JobFacts
from everstep_agent.vault.settings import VaultSettings

# ---- witness
# Peers that are gone: told to the supervisor when a connection broke and the peer's vault takes no other.
#
# A connection ends for many reasons (a job that is over, a copy that was given up), so each break is looked at again
# before a word is said. Both sides of a connection notice, the one that copies and the one that is copied to.

log = logging.getLogger(__name__)

ONE_LOOK_IN_S = 1.0
"""Of breaks with one peer (each rank has connections of its own) the first in a second is looked at."""

LOOKS_AFTER_S = (0.0, 0.05)
"""Pauses before each look: a process that is being killed may still take a connection at first."""

CONNECT_TIMEOUT_S = 0.3
"""A machine on the same network takes a connection within milliseconds; one that is gone does not answer."""


class Witness:
    """Safe to use from any thread. ``tell`` is called from a thread of its own."""

    def __init__(self, node: str, book: JobBook, clock: Clock, tell: Callable[[PeerLost], None]) -> None:
        self._node = node
        self._book = book
        self._clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._looked_at: dict[str, float] = {}
        self._closed = False

    def broke(self, job: str, peer: str, why: str) -> None:
        """A proved connection of ``job`` with ``peer`` ended without our doing."""
        now = self._clock.monotonic()
        with self._lock:
            if self._closed or now < self._looked_at.get(peer, -ONE_LOOK_IN_S) + ONE_LOOK_IN_S:
                return
            self._looked_at[peer] = now
        threading.Thread(target=self._look, args=(job, peer, why), name="witness", daemon=True).start()

    def close(self) -> None:
        """No word after this: the connections end because we do."""
        with self._lock:
            self._closed = True

    def _look(self, job: str, peer: str, why: str) -> None:
        try:
            address = split_address(self._book.facts(job).address(peer))
        except NotFound:
            return  # the job is over, or has nothing there any more
        for pause_s in LOOKS_AFTER_S:
            time.sleep(pause_s)
            refusal = _refusal(address)
            if refusal:
                self._say(job, peer, f"{why}; then: {refusal}")
                return

    def _say(self, job: str, peer: str, detail: str) -> None:
        with self._lock:
            if self._closed:
                return
        lost = PeerLost(job=job, at=self._clock.wall(), trace=uuid.uuid4().hex[:16], peer=peer, detail=detail[:1000])
        context = {"node": self._node, "job": job, "trace": lost.trace}
        log.warning("the vault of %s is out of reach: %s", peer, detail, extra=context)
        self._tell(lost)


def _refusal(address: tuple[str, int]) -> str:
    """Why no connection is taken there, empty where one is."""
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


# ---- handshake
# The two sides of the mutual challenge that begins every connection between vaults.


def introduce(channel: Channel, facts: JobFacts, node: str, to: str, *, read_only: bool = False) -> None:
    """The client's side, as ``node``. Raises AuthenticationError where the peer does not prove to be ``to``."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    greeting = Greeting(protocols=VAULTS_SPEAK, job=facts.job, node=node, to=to, nonce=nonce, read_only=read_only)
    channel.send(greeting)
    challenge = channel.opening_answer()
    if isinstance(challenge, Refused):
        raise refused_error(challenge, channel.peer)
    if not isinstance(challenge, Challenge):
        raise MalformedMessage(f"{channel.peer} answered a greeting with {type(challenge).__name__}")
    negotiate([challenge.protocol], VAULTS_SPEAK)
    channel.send(Proof(mac=prove(facts.secret, "client", greeting, challenge)))
    answer = channel.opening_answer()
    if isinstance(answer, Refused):
        raise refused_error(answer, channel.peer)
    if not isinstance(answer, Proof) or not proves(answer.mac, facts.secret, "server", greeting, challenge):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {facts.job}, or is not {to}")


def admit(channel: Channel, book: JobBook, node: str) -> tuple[JobFacts, Greeting]:
    """The server's side, as ``node``: the job that the connection is for, and what the client said of itself.

    Raises NotFound for an unknown job, AuthenticationError for a stranger, VersionMismatch, MalformedMessage.
    """
    greeting = channel.opening()
    if not isinstance(greeting, Greeting):
        raise MalformedMessage(f"{channel.peer} began with {type(greeting).__name__}, not with a greeting")
    if greeting.to != node:
        raise AuthenticationError(f"{greeting.node} means to reach {greeting.to}, and this is {node}")
    challenge = Challenge(protocol=negotiate(greeting.protocols, VAULTS_SPEAK), nonce=secrets.token_bytes(NONCE_BYTES))
    facts = book.facts(greeting.job)
    channel.send(challenge)
    proof = channel.opening()
    if not isinstance(proof, Proof) or not proves(proof.mac, facts.secret, "client", greeting, challenge):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {greeting.job}")
    channel.send(Proof(mac=prove(facts.secret, "server", greeting, challenge)))
    return facts, greeting


# ---- manifests
# A slot's manifest, or bytes of its payload, from a peer: bulk that is hashed by who asks. Only that one knows by what
# digest.


def ask_manifest(
    channel: Channel, settings: VaultSettings, rank: int, version: Version, *, parity: bool = False
) -> bytes:
    """What ``rank`` (``parity``: the group of that number) sealed as ``version``, unchecked.

    Raises what the peer refuses for, and MalformedMessage for more than a manifest may be.
    """
    channel.send(Get(rank=rank, version=version, ranges=(), parity=parity))
    channel.patience(settings.settle_timeout_s)
    length = channel.answer(Data).bytes
    if length > MOST_MANIFEST_BYTES:
        raise MalformedMessage(
            f"{channel.peer} announced a manifest of {length} bytes, and at most {MOST_MANIFEST_BYTES} are taken"
        )
    channel.patience(settings.io_timeout_s)
    return receive_pieces(channel, length)


def ask_bytes(
    channel: Channel, settings: VaultSettings, rank: int, version: Version, ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Those (offset, length) of the payload that ``rank`` sealed as ``version``, one after another.

    The peer hashes before it answers. Raises what it refuses for, and MalformedMessage for another number of bytes.
    """
    channel.send(Get(rank=rank, version=version, ranges=tuple(ranges)))
    channel.patience(settings.settle_timeout_s)
    announced, wanted = channel.answer(Data).bytes, sum(length for _, length in ranges)
    if announced != wanted:
        raise MalformedMessage(f"{channel.peer} announced {announced} bytes where {wanted} were asked for")
    channel.patience(settings.io_timeout_s)
    return receive_pieces(channel, wanted)


def receive_pieces(channel: Channel, length: int) -> bytes:
    """The bulk that was announced. Raises what the peer breaks off for."""
    found = bytearray(length)
    for start in range(0, length, CHUNK_BYTES):
        channel.receive_into(memoryview(found)[start : start + CHUNK_BYTES])
        if not channel.status():
            channel.answer(DataEnd)  # raises what the peer refuses for
            raise MalformedMessage(f"{channel.peer} said that the slot moved on, and then that it did not")
    channel.answer(DataEnd)
    return bytes(found)


T = TypeVar("T")
Key = tuple[str, str, str, bytes]

_INTRODUCTION = Backoff(floor_s=0.01, ceiling_s=0.1)


class Peers:
    """A pool of connections by job, node and address. Safe to use from any thread."""

    def __init__(self, settings: VaultSettings, book: JobBook, clock: Clock, witness: Witness) -> None:
        self._settings = settings
        self._book = book
        self._clock = clock
        self._witness = witness
        self._lock = threading.Lock()
        self._idle: defaultdict[Key, list[Channel]] = defaultdict(list)
        self._busy: set[Channel] = set()
        self._stopping = threading.Event()

    def call(self, job: str, node: str, action: Callable[[Channel], T], timeout_s: float | None = None) -> T:
        """Runs ``action`` over a connection to ``node``'s vault, a kept one where there is one.

        Actions must bear being run twice: a kept connection that proves to be dead is replaced by a new one.
        ``timeout_s`` bounds each wait of this call instead of the settings' time-outs. Raises NotFound where the node
        is no holder or does not know the job, Unavailable where it does not answer, AuthenticationError, and what
        ``action`` raises.
        """
        facts = self._book.facts(job)
        key = (job, node, facts.address(node), facts.secret)
        kept = self._take(key)
        if kept is not None:
            try:
                return self._use(key, kept, action, timeout_s)
            except Unavailable:
                self._drop(key)
        return self._use(key, self._introduced(facts, node, key, timeout_s), action, timeout_s)

    def lend(self, job: str, node: str) -> Channel:
        """A new connection to ``node``'s vault, for reads alone, for the caller to keep. Raises what ``call`` does."""
        facts = self._book.facts(job)
        key = (job, node, facts.address(node), facts.secret)
        channel = self._introduced(facts, node, key, None, read_only=True)
        with self._lock:
            self._busy.discard(channel)
        return channel

    def broke(self, job: str, node: str, why: str) -> None:
        """One that was lent ended without its new owner's doing."""
        self._witness.broke(job, node, why)

    def _take(self, key: Key) -> Channel | None:
        with self._lock:
            channels = self._idle.get(key)
            if not channels:
                return None
            channel = channels.pop()
            self._busy.add(channel)
            return channel

    def _use(self, key: Key, channel: Channel, action: Callable[[Channel], T], timeout_s: float | None) -> T:
        channel.patience(timeout_s or self._settings.io_timeout_s)
        try:
            result = action(channel)
        except BaseException as error:
            self._discard(channel)
            if isinstance(error, Unavailable):
                self._witness.broke(key[0], key[1], str(error))
            raise
        with self._lock:
            self._busy.discard(channel)
            keep = not self._stopping.is_set()
            if keep:
                self._idle[key].append(channel)
        if not keep:
            channel.close()
        return result

    def _discard(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()

    def _drop(self, key: Key) -> None:
        with self._lock:
            dead = self._idle.pop(key, [])
        for channel in dead:
            channel.close()

    def _introduced(
        self, facts: JobFacts, node: str, key: Key, timeout_s: float | None, *, read_only: bool = False
    ) -> Channel:
        """A proved connection. A node that does not know the job yet is asked again for a while."""
        deadline = self._clock.monotonic() + (
            self._settings.introduction_s if timeout_s is None else min(timeout_s, self._settings.introduction_s)
        )
        attempt = 0
        while True:
            try:
                return self._connect(facts, node, key[2], timeout_s, read_only)
            except NotFound:
                pause_s = _INTRODUCTION.delay_s(attempt, 0.5)
                if self._clock.monotonic() + pause_s > deadline or self._stopping.wait(pause_s):
                    raise
                attempt += 1

    def _connect(self, facts: JobFacts, node: str, address: str, timeout_s: float | None, read_only: bool) -> Channel:
        settings = self._settings
        wait_s = timeout_s or settings.io_timeout_s
        channel = connect(address, node, min(wait_s, settings.connect_timeout_s), settings.io_timeout_s)
        with self._lock:
            self._busy.add(channel)
        try:
            channel.patience(wait_s)
            introduce(channel, facts, settings.node, node, read_only=read_only)
        except BaseException:
            self._discard(channel)
            raise
        return channel

    def configured(self, facts: JobFacts) -> None:
        """Closes the idle connections of the job that lead to no holder any more: another address, or secret."""
        here = {(facts.job, node, address, facts.secret) for node, address in facts.holders.items()}
        self._close_idle(lambda key: key[0] == facts.job and key not in here)

    def forget(self, job: str) -> None:
        """Closes the idle connections of a job that is over."""
        self._close_idle(lambda key: key[0] == job)

    def _close_idle(self, chosen: Callable[[Key], bool]) -> None:
        with self._lock:
            dead = [channel for key in list(self._idle) if chosen(key) for channel in self._idle.pop(key)]
        for channel in dead:
            channel.close()

    def close(self) -> None:
        """Ends all connections; whoever uses one gets Unavailable."""
        self._stopping.set()
        with self._lock:
            channels = [*self._busy, *(c for kept in self._idle.values() for c in kept)]
            self._idle.clear()
        for channel in channels:
            channel.shutdown()

    def __len__(self) -> int:
        with self._lock:
            return len(self._busy) + sum(map(len, self._idle.values()))
