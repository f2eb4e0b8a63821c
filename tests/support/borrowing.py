"""What a rank does with a connection that its vault lends, in the plainest way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import xxhash
from everstep_trainer.memory_tier.vault_client import VaultClient

from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.transfer import Data, DataEnd, Get
from tests.support.vaults import JOB, VaultProcess


@contextmanager
def rank_of(vault: VaultProcess) -> Iterator[VaultClient]:
    """A rank's client of its node's vault."""
    with closing(VaultClient(str(vault.run_dir / "vault.sock"))) as client:
        yield client


def borrowed(rank: VaultClient, node: str) -> VaultChannel:
    """A connection to ``node``'s vault. Raises what its own vault, or that one, refuses for."""
    lent = rank.connect(job=JOB, node=node).result()
    assert lent.answer_timeout_s >= lent.io_timeout_s > 0
    return VaultChannel(lent.sock, node, lent.io_timeout_s)


def read(
    channel: VaultChannel, rank: int, version: Version, ranges: Sequence[tuple[int, int]], unhashed: bool = False
) -> bytes:
    """The ranges one after another. Raises what the holder refuses or breaks off for; AssertionError where the digests
    that it sends are not those of the bytes."""
    channel.send(Get(rank=rank, version=version, ranges=tuple(ranges), skip_hash=unhashed))
    data = memoryview(bytearray(channel.receive_answer(Data).bytes))
    for start in range(0, len(data), CHUNK_BYTES):
        channel.receive_into(data[start : start + CHUNK_BYTES])
        if not channel.receive_piece_status():
            channel.receive_answer(DataEnd)  # raises what it broke off for
            raise AssertionError("the holder broke off, and did not say why")
    digests, at = b"", 0
    for _, length in ranges:
        digests += xxhash.xxh3_128_digest(data[at : at + length])
        at += length
    assert channel.receive_answer(DataEnd).digests == digests
    return bytes(data)
