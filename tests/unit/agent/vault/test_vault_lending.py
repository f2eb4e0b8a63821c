"""Connections that a vault authenticates and hands to its ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.errors import AuthenticationError, NotFound
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.native import DIGEST_BYTES
from everstep.wire.v1.transfer import Put
from everstep_trainer.slots.vault_client import VaultClient
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.peer_reads import peer_connection, rank_client, read
from tests.support.vaults.vault_process import JOB, SECRET, RankMemory, Vaults, noise, two_vaults

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
    with rank_client(fleet.all[0]) as client:
        yield client


def test_rank_reads_slots_over_a_lent_connection(rank: VaultClient) -> None:
    channel = peer_connection(rank, "n2")
    assert read(channel, 3, V, [(0, CHUNK_BYTES)]) == PAYLOAD[:CHUNK_BYTES]
    assert read(channel, 3, V, [(5, 7), (CHUNK_BYTES + 1, 9)]) == PAYLOAD[5:12] + PAYLOAD[CHUNK_BYTES + 1 :][:9]
    channel.close()


def test_lent_connection_is_read_only(fleet: Vaults, rank: VaultClient) -> None:
    channel = peer_connection(rank, "n2")
    put = Put(
        generation=1,
        rank=3,
        version=Version(1, 2),
        slot_bytes=1 << 16,
        slots=4,
        payload_bytes=0,
        manifest_bytes=0,
        digests=bytes(DIGEST_BYTES),
    )
    channel.send(put)
    with pytest.raises(AuthenticationError, match="n1 opened this connection for reading only"):
        channel.receive_any_answer()
    channel.close()
    slots = fleet.all[1].client().inventory().slots
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
