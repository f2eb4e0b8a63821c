"""Connections that a vault proves and hands to its ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from everstep_trainer.memory_tier.vault_client import VaultClient

from everstep.errors import AuthenticationError, NotFound, Unavailable
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.native import DIGEST_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1 import local
from everstep.wire.v1.transfer import Put
from tests.support.borrowing import borrowed, rank_of, read
from tests.support.forked import ForkPool
from tests.support.vaults import JOB, SECRET, RankMemory, Vaults, noise, two_vaults
from tests.support.waiting import until

V = Version(1, 1)
PAYLOAD = noise(CHUNK_BYTES + 1000)


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with two_vaults(program_forks) as running:
        yield running


@pytest.fixture
def rank(fleet: Vaults) -> Iterator[VaultClient]:
    """A rank on n1. Rank 3 on n2 has a sealed slot."""
    RankMemory(fleet.all[1].client(), rank=3, slot_bytes=slot_bytes_for(64, len(PAYLOAD))).fill(0, V, PAYLOAD)
    with rank_of(fleet.all[0]) as client:
        yield client


def test_rank_reads_slots_over_a_lent_connection(rank: VaultClient) -> None:
    channel = borrowed(rank, "n2")
    assert read(channel, 3, V, [(0, CHUNK_BYTES)]) == PAYLOAD[:CHUNK_BYTES]
    assert read(channel, 3, V, [(5, 7), (CHUNK_BYTES + 1, 9)]) == PAYLOAD[5:12] + PAYLOAD[CHUNK_BYTES + 1 :][:9]
    channel.close()


def test_many_lent_connections_are_independent(rank: VaultClient) -> None:
    asked = [rank.connect(job=JOB, node="n2") for _ in range(20)]
    channels = [VaultChannel(one.result().sock, "n2", 10.0) for one in asked]
    channels[0].close()
    assert {read(channel, 3, V, [(3, 4)]) for channel in channels[1:]} == {PAYLOAD[3:7]}
    for channel in channels[1:]:
        channel.close()


def test_lent_connection_is_read_only(fleet: Vaults, rank: VaultClient) -> None:
    channel = borrowed(rank, "n2")
    put = {"generation": 1, "rank": 3, "version": Version(1, 2), "slot_bytes": 1 << 16, "slots": 4}
    channel.send(Put(**put, payload_bytes=0, manifest_bytes=0, digests=bytes(DIGEST_BYTES)))
    with pytest.raises(AuthenticationError, match="n1 opened this connection for reading only"):
        channel.receive_any_answer()
    channel.close()
    slots = fleet.all[1].client().ask(local.Inventory, job=JOB).slots
    assert [(slot.rank, slot.version) for slot in slots] == [(3, V)]


def test_unknown_job_and_non_holder_node_are_refused(rank: VaultClient) -> None:
    with pytest.raises(NotFound, match="is unknown to this vault"):
        rank.connect(job="another", node="n2").result()
    with pytest.raises(NotFound, match="n7 is not among the holders"):
        rank.connect(job=JOB, node="n7").result()


def test_vault_with_a_different_secret_lends_nothing(fleet: Vaults, rank: VaultClient) -> None:
    fleet.configure(fleet.all[0], generation=2, secret=SECRET[::-1])
    with pytest.raises(AuthenticationError):
        rank.connect(job=JOB, node="n2").result()


def test_lent_connection_ends_when_the_secret_changes(fleet: Vaults, rank: VaultClient) -> None:
    channel = borrowed(rank, "n2")
    fleet.configure(generation=2, secret=SECRET[::-1])
    with pytest.raises(AuthenticationError, match="reconnect with the new secret"):
        read(channel, 3, V, [(0, 1)])
    channel.close()


def test_lost_peer_is_unavailable_and_reported(fleet: Vaults, rank: VaultClient) -> None:
    channel = borrowed(rank, "n2")
    fleet.all[1].kill()
    with pytest.raises(Unavailable) as broken:
        read(channel, 3, V, [(0, 1)])
    channel.close()
    rank.report_broken_connection(job=JOB, node="n2", reason=str(broken.value))
    assert fleet.supervisors["n1"].peer_lost().peer == "n2"
    with pytest.raises(Unavailable):
        rank.connect(job=JOB, node="n2").result()


def test_unclaimed_descriptor_is_closed_by_the_vault(fleet: Vaults) -> None:
    client = fleet.all[0].client()
    assert isinstance(client.ask(local.OpenPeerConnection, job=JOB, node="n2"), local.PeerConnectionOpened)
    statistics = fleet.all[0].client()
    until(lambda: statistics.ask(local.Statistics).gauges["peer_connections"] == 0, "nothing is open")
