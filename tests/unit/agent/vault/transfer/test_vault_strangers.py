"""A vault's behaviour towards peers without the secret, and towards peers with it that send wrong data."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import msgspec
import pytest
import xxhash

from everstep.errors import (
    AuthenticationError,
    Conflict,
    DigestMismatch,
    EverstepError,
    MalformedMessage,
    NotFound,
    OutOfSlotMemory,
    StaleGeneration,
    VersionMismatch,
)
from everstep.ids import Version, split_address
from everstep.layout.manifests import MAX_MANIFEST_BYTES
from everstep.layout.slots import CHUNK_BYTES, chunk_digests
from everstep.vocabulary import FindingKind
from everstep.wire.framing import VAULT_SUPPORTED_VERSIONS, VaultChannel, connect, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import (
    NONCE_BYTES,
    PIECE_VALID,
    Ack,
    Challenge,
    Get,
    Greeting,
    InventoryList,
    InventoryRequest,
    ManifestPart,
    Part,
    PartDone,
    Proof,
    Put,
    PutDone,
    Ready,
    TransferRefused,
    make_proof,
)
from everstep_agent.vault.job_table import JobConfig
from everstep_agent.vault.transfer.peers import client_handshake
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, SECRET, VaultClient, Vaults, vaults

V = Version(1, 1)
MANIFEST = b"manifest"


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with vaults(program_forks) as running:
        running.start("n1")
        yield running


@pytest.fixture
def supervisor(fleet: Vaults) -> VaultClient:
    return fleet.configure()["n1"]


def facts(secret: str = SECRET, job: str = JOB) -> JobConfig:
    return JobConfig(job=job, generation=1, secret=secret.encode(), holders={})


class Wire:
    """Connections to n1 as other nodes' vaults, or strangers, would make them; closed with the test."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channels: list[VaultChannel] = []

    def dial(self) -> VaultChannel:
        channel = connect(self.address, "n1", 5.0, 10.0)
        self._channels.append(channel)
        return channel

    def proved(self, node: str = "n8", known: JobConfig | None = None, to: str = "n1") -> VaultChannel:
        channel = self.dial()
        job = known or facts()
        client_handshake(channel, job.job, job.secret, node, to)
        return channel

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@pytest.fixture
def wire(fleet: Vaults) -> Iterator[Wire]:
    connections = Wire(fleet.all[0].address)
    yield connections
    connections.close()


def refused(client: VaultClient) -> dict[str, int]:
    return client.statistics().refused


def put(payload: bytes, **fields: object) -> Put:
    offer = Put(
        generation=1,
        rank=0,
        version=V,
        slot_bytes=1 << 16,
        slots=4,
        payload_bytes=len(payload),
        manifest_bytes=len(MANIFEST),
        digests=b"".join([xxhash.xxh3_128_digest(MANIFEST), *chunk_digests(memoryview(payload))]),
    )
    return msgspec.structs.replace(offer, **fields)


def begin(channel: VaultChannel, message: Put) -> bytes:
    """The transfer, with the manifest there."""
    channel.send(message)
    ready = channel.receive_answer(Ready)
    if ready.needs_manifest:
        channel.send(ManifestPart(transfer=ready.transfer))
        bulk(channel, MANIFEST, PIECE_VALID)
        channel.receive_answer(PartDone)
    return ready.transfer


def bulk(channel: VaultChannel, *pieces: bytes) -> None:
    channel.send_bulk([memoryview(piece) for piece in pieces])


@pytest.mark.promise("strangers")
def test_stranger_is_refused_and_counted(wire: Wire, supervisor: VaultClient) -> None:
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        wire.proved(known=facts("some other secret of 30 letters"))
    until(lambda: refused(supervisor) == {"unauthenticated": 1}, "it is counted")


@pytest.mark.promise("strangers")
def test_proof_cannot_be_replayed(wire: Wire, supervisor: VaultClient) -> None:
    greeting = Greeting(
        protocols=VAULT_SUPPORTED_VERSIONS, job=JOB, node="n8", peer="n1", nonce=secrets.token_bytes(NONCE_BYTES)
    )
    first = wire.dial()
    first.send(greeting)
    challenge = first.receive_opening_answer()
    assert isinstance(challenge, Challenge)
    overheard = Proof(mac=make_proof(SECRET.encode(), "client", greeting, challenge))
    first.send(overheard)
    assert isinstance(first.receive_opening_answer(), Proof)
    second = wire.dial()
    second.send(greeting)
    assert isinstance(second.receive_opening_answer(), Challenge)
    second.send(overheard)
    refusal = second.receive_opening_answer()
    assert isinstance(refusal, TransferRefused)
    assert refusal.code == "unauthenticated"


def test_client_rejects_a_server_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        channel = connect(address, "n1", 5.0, 10.0)
        impostor = VaultChannel(listener.accept()[0], "client", 10.0)
        impostor.send(Challenge(protocol=VAULT_SUPPORTED_VERSIONS[0], nonce=bytes(NONCE_BYTES)))
        impostor.send(Proof(mac=bytes(32)))
        with pytest.raises(AuthenticationError, match="or is not n1"):
            client_handshake(channel, facts().job, facts().secret, "n8", "n1")
        impostor.close()
        channel.close()


def test_missing_common_protocol_is_a_version_mismatch(wire: Wire, supervisor: VaultClient) -> None:
    channel = wire.dial()
    channel.send(Greeting(protocols=(99,), job=JOB, node="n8", peer="n1", nonce=bytes(NONCE_BYTES)))
    refusal = channel.receive_opening_answer()
    assert isinstance(refusal, TransferRefused)
    assert refusal.code == VersionMismatch.code


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x10\x01",
        b"\x00\x00\x00\x04junk",
        b"\x00\x00\x10\x00" + b"\x81\xa1x" + b"\x91" * 4093,
        encode_frame(Proof(mac=bytes(32))),
    ],
    ids=["another protocol", "a frame over the limit", "no message", "nested without end", "out of turn"],
)
def test_junk_ends_the_connection_and_nothing_else(
    fleet: Vaults, wire: Wire, supervisor: VaultClient, junk: bytes
) -> None:
    with socket.create_connection(split_address(fleet.all[0].address)) as sock:
        sock.settimeout(10.0)
        sock.sendall(junk)
        received = b""
        while data := sock.recv(4096):
            received += data
        assert b"malformed" in received
    wire.proved().close()
    assert refused(supervisor) == {"malformed": 1}


def test_silent_stranger_delays_no_peer(fleet: Vaults, wire: Wire, supervisor: VaultClient) -> None:
    with socket.create_connection(split_address(fleet.all[0].address)):
        channel = wire.proved()
        channel.send(InventoryRequest())
        assert channel.receive_answer(InventoryList).slots == ()


def test_corrupt_chunk_is_refused_and_names_the_sender(wire: Wire, supervisor: VaultClient) -> None:
    channel = wire.proved(node="n8")
    payload = bytes(CHUNK_BYTES + 5)
    transfer = begin(channel, put(payload, slot_bytes=1 << 24))
    channel.send(Part(transfer=transfer, first_chunk=0, chunks=2))
    bulk(channel, b"\1" + payload[1:CHUNK_BYTES], PIECE_VALID, payload[CHUNK_BYTES:], PIECE_VALID)
    with pytest.raises(DigestMismatch, match="chunk 0 of rank 0's version 1:1"):
        channel.receive_answer(PartDone)
    found = supervisor.finding().finding.finding
    assert (found.kind, found.subject) == (FindingKind.TRANSFER_CORRUPT, "n8")
    channel.send(PutDone(transfer=transfer))
    with pytest.raises(NotFound):
        channel.receive_answer(Ack)
    channel.send(InventoryRequest())
    assert channel.receive_answer(InventoryList).slots == ()
    assert refused(supervisor) == {"digest_mismatch": 1, "not_found": 1}


def test_corrupt_manifest_is_refused(wire: Wire, supervisor: VaultClient) -> None:
    channel = wire.proved()
    channel.send(put(b"x"))
    transfer = channel.receive_answer(Ready).transfer
    channel.send(ManifestPart(transfer=transfer))
    bulk(channel, MANIFEST[::-1], PIECE_VALID)
    with pytest.raises(DigestMismatch, match="the manifest of rank 0's version 1:1"):
        channel.receive_answer(PartDone)
    assert supervisor.finding().finding.finding.kind is FindingKind.TRANSFER_CORRUPT
    channel.send(PutDone(transfer=transfer))
    with pytest.raises(NotFound):
        channel.receive_answer(Ack)


@pytest.mark.usefixtures("supervisor")
def test_oversized_manifest_is_refused_before_transfer(wire: Wire) -> None:
    channel = wire.proved()
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(put(b"x"))) | {"manifest_bytes": MAX_MANIFEST_BYTES + 1}
    channel.send_bulk([memoryview(encode_frame(raw))])
    with pytest.raises(MalformedMessage):
        channel.receive_answer(Ready)


@pytest.mark.usefixtures("supervisor")
def test_slot_without_complete_manifest_is_not_sealed(wire: Wire) -> None:
    channel = wire.proved()
    channel.send(put(bytes(10)))
    transfer = channel.receive_answer(Ready).transfer
    channel.send(Part(transfer=transfer, first_chunk=0, chunks=1))
    bulk(channel, bytes(10), PIECE_VALID)
    channel.receive_answer(PartDone)
    channel.send(PutDone(transfer=transfer))
    with pytest.raises(Conflict, match="not the manifest"):
        channel.receive_answer(Ack)
    channel.send(ManifestPart(transfer=transfer))
    bulk(channel, MANIFEST[:3])
    channel.close()
    again = wire.proved()

    def offered() -> Ready | None:
        again.send(put(bytes(10)))
        ready = again.receive_answer(Ready)
        return ready if ready.present_chunks else None

    ready = until(offered, "the vault has seen the connection's end")
    assert ready.needs_manifest, "and what came of it is not taken for the whole"
    again.send(ManifestPart(transfer=ready.transfer))
    bulk(again, MANIFEST, PIECE_VALID)
    again.receive_answer(PartDone)
    again.send(PutDone(transfer=ready.transfer))
    again.receive_answer(Ack)
    again.send(InventoryRequest())
    (slot,) = again.receive_answer(InventoryList).slots
    assert slot.manifest_digest == xxhash.xxh3_128_hexdigest(MANIFEST)


def test_transfer_belongs_to_the_initiating_node(wire: Wire, supervisor: VaultClient) -> None:
    mine, theirs = wire.proved(node="n8"), wire.proved(node="n9")
    transfer = begin(mine, put(bytes(10)))
    theirs.send(PutDone(transfer=transfer))
    with pytest.raises(NotFound):
        theirs.receive_answer(Ack)
    theirs.send(Part(transfer=transfer, first_chunk=0, chunks=1))
    with pytest.raises(MalformedMessage):
        theirs.receive_answer(PartDone)


def test_secret_of_one_job_gives_no_access_to_another(wire: Wire, supervisor: VaultClient) -> None:
    secret = "a secret of the other job, for tests"
    supervisor.ask(local.ConfigureJob, job="other", generation=1, secret=secret, holders=())
    mine = wire.proved()
    transfer = begin(mine, put(bytes(10)))
    with pytest.raises(AuthenticationError):
        wire.proved(known=facts(secret))
    theirs = wire.proved(known=facts(secret, job="other"))
    theirs.send(PutDone(transfer=transfer))
    with pytest.raises(NotFound):
        theirs.receive_answer(Ack)
    mine.send(Part(transfer=transfer, first_chunk=0, chunks=1))
    bulk(mine, bytes(10), PIECE_VALID)
    mine.receive_answer(PartDone)
    mine.send(PutDone(transfer=transfer))
    mine.receive_answer(Ack)
    theirs.send(InventoryRequest())
    assert theirs.receive_answer(InventoryList).slots == ()
    theirs.send(Get(rank=0, version=V, ranges=((0, 10),)))
    with pytest.raises(NotFound):
        theirs.receive_any_answer()
    theirs.send(Part(transfer=transfer, first_chunk=0, chunks=1))
    with pytest.raises(MalformedMessage):
        theirs.receive_answer(PartDone)
    assert refused(supervisor) == {"unauthenticated": 1, "not_found": 2, "malformed": 1}


def test_lost_sender_frees_the_slot_being_filled(wire: Wire, supervisor: VaultClient) -> None:
    for _ in range(5):
        channel = wire.proved()
        begin(channel, put(bytes(10)))
        channel.close()
    until(lambda: supervisor.statistics().gauges["peer_connections"] == 0, "the vault noticed")
    four = [wire.proved() for _ in range(4)]
    for step, channel in enumerate(four):
        begin(channel, put(bytes(10), version=Version(1, step)))
    fifth = wire.proved()
    fifth.send(put(bytes(10), version=Version(1, 5)))
    with pytest.raises(OutOfSlotMemory):
        fifth.receive_answer(Ready)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (put(bytes(10), digests=b"short"), MalformedMessage),
        (put(bytes(10), payload_bytes=CHUNK_BYTES * 3), MalformedMessage),
        (put(bytes(10), slot_bytes=1 << 47), OutOfSlotMemory),
        (put(bytes(10), generation=0), StaleGeneration),
        (Get(rank=0, version=V, ranges=()), NotFound),
        (Part(transfer=bytes(16), first_chunk=0, chunks=1), MalformedMessage),
    ],
    ids=["digests", "length", "memory", "generation", "nothing there", "no transfer"],
)
def test_unservable_request_is_answered_with_its_error(
    wire: Wire, supervisor: VaultClient, message: Put, error: type[EverstepError]
) -> None:
    channel = wire.proved()
    channel.send(message)
    with pytest.raises(error):
        channel.receive_any_answer()
