"""Reads of a rank from another node's vault, over a connection that its own vault has opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import xxhash

from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import Data, DataEnd, Get
from everstep_trainer.slots.vault_client import VaultClient
from tests.support.vaults.vault_process import JOB, VaultProcess


@contextmanager
def rank_client(vault: VaultProcess) -> Iterator[VaultClient]:
    """Yield a rank's client of its node's vault."""
    with closing(VaultClient(str(vault.run_dir / "vault.sock"))) as client:
        yield client


def peer_connection(rank: VaultClient, node: str) -> VaultChannel:
    """Return a connection to ``node``'s vault. Raises the error of the vault that refuses it."""
    connection = rank.connect(job=JOB, node=node).result()
    assert connection.answer_timeout_s >= connection.io_timeout_s > 0
    return VaultChannel(connection.sock, node, connection.io_timeout_s)


def read(
    channel: VaultChannel, rank: int, version: Version, ranges: Sequence[tuple[int, int]], unhashed: bool = False
) -> bytes:
    """Return the bytes of the ranges in order.

    Raises the holder's error if the holder refuses or aborts, and AssertionError if the digests do not match the bytes.
    """
    channel.send(Get(rank=rank, version=version, ranges=tuple(ranges), skip_hash=unhashed))
    data = memoryview(bytearray(channel.receive_answer(Data).bytes))
    for start in range(0, len(data), CHUNK_BYTES):
        channel.receive_into(data[start : start + CHUNK_BYTES])
        if not channel.receive_piece_status():
            channel.receive_answer(DataEnd)  # raises the holder's error
            raise AssertionError("the holder aborted without an error")
    digests, at = b"", 0
    for _, length in ranges:
        digests += xxhash.xxh3_128_digest(data[at : at + length])
        at += length
    assert channel.receive_answer(DataEnd).digests == digests
    return bytes(data)
