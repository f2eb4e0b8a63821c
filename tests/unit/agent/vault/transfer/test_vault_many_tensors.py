"""A hundred thousand tensors in one slot: a manifest larger than any frame is stored, copied once for all versions,
read from afar, found again, and mended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from everstep.errors import ConfigurationError
from everstep.ids import Version
from everstep.layout.manifests import (
    LAYOUT_FORMAT,
    Box,
    Manifest,
    StoredBox,
    TensorInfo,
    encode_manifest,
)
from everstep.layout.slots import SegmentView, slot_bytes_for
from everstep.vocabulary import FindingKind
from everstep.wire.v1 import local
from tests.support.processes.waiting import until
from tests.support.vaults.peer_reads import peer_connection, rank_client, read
from tests.support.vaults.vault_process import JOB, RankMemory, VaultClient, VaultProcess, Vaults, map_segment, noise

MANY = 100_000
NO_SCRUB = ("--scrub-interval-s", "0")
V1, V2 = Version(1, 1), Version(1, 2)


def manifest_of(count: int) -> Manifest:
    """Return a manifest of scalars, with names as long as those of moments in deeply nested models."""
    prefix = (
        "optimizer.model.encoder.blocks.7.decoder.layers.13.attention.query_key_value.linear.parametrizations.weight"
    )
    prefix += ".original0.exp_avg_sq"
    return Manifest(
        LAYOUT_FORMAT,
        3,
        1,
        tuple(TensorInfo(f"{prefix}.{n:06}", "float32", 4, (1, 1, 1), False) for n in range(count)),
        tuple(StoredBox(n, Box((0, 0, 0), (1, 1, 1)), 64 * n) for n in range(count)),
        64 * count,
        1,
        64 * count + 64,
        64 * count + 64,
    )


MANIFEST = manifest_of(MANY)
ENCODED = encode_manifest(MANIFEST)
PAYLOADS = {V1: noise(MANIFEST.payload_bytes), V2: noise(MANIFEST.payload_bytes, seed=2)}


def owner(vault: VaultProcess) -> RankMemory:
    slot_bytes = slot_bytes_for(len(ENCODED), MANIFEST.payload_bytes)
    return RankMemory(vault.client(), rank=3, slot_bytes=slot_bytes)


def store(rank: RankMemory, slot: int, version: Version) -> None:
    rank.fill(slot, version, PAYLOADS[version], ENCODED)
    assert rank.replicated(slot, version, ["n2"]).nodes == ("n2",)


def copies(vault: VaultProcess) -> SegmentView:
    return map_segment(Path(vault.segment_dir, JOB, "replica-3"))


def fetched(vault: VaultProcess, client: VaultClient, node: str, version: Version, **fields: object) -> bytes:
    into = Path(vault.segment_dir, JOB, "scratch")
    into.parent.mkdir(exist_ok=True)
    answer = client.ask(local.Fetch, job=JOB, node=node, rank=3, version=version, target_path=str(into), **fields)
    assert isinstance(answer, local.Fetched), answer
    return into.read_bytes()[: answer.bytes]


def test_copy_is_read_remotely_even_after_a_vault_restart(fleet: Vaults) -> None:
    first, second = fleet.start("n1", *NO_SCRUB), fleet.start("n2", *NO_SCRUB)
    clients = fleet.configure()
    store(owner(first), 0, V1)
    assert fetched(first, clients["n1"], "n2", V1, ranges=()) == ENCODED
    second.kill()
    again = fleet.start("n2", *NO_SCRUB)
    clients = fleet.configure(first, again)
    (slot,) = clients["n2"].inventory().slots
    assert slot.manifest_digest == xxhash.xxh3_128_hexdigest(ENCODED)
    assert fetched(first, clients["n1"], "n2", V1, ranges=()) == ENCODED
    two = PAYLOADS[V1][64:68] + PAYLOADS[V1][640:644]
    with rank_client(first) as reader, closing(peer_connection(reader, "n2")) as channel:
        assert read(channel, 3, V1, [(64, 4), (640, 4)]) == two


def test_copy_with_a_corrupt_manifest_is_not_adopted(fleet: Vaults) -> None:
    first, second = fleet.start("n1", *NO_SCRUB), fleet.start("n2", *NO_SCRUB)
    fleet.configure()
    store(owner(first), 0, V1)
    second.kill()
    copies(second).manifest_view(0)[len(ENCODED) // 2] ^= 1
    again = fleet.start("n2", *NO_SCRUB)
    clients = fleet.configure(first, again)
    assert clients["n2"].finding().finding.finding.kind is FindingKind.SLOT_CORRUPT
    assert clients["n2"].inventory().slots == ()


@pytest.mark.parametrize("rotten", ["n1", "n2"])
def test_flipped_manifest_bit_is_repaired_from_other_holder(fleet: Vaults, rotten: str) -> None:
    first, second = (fleet.start(n, "--scrub-interval-s", "0.02" if n == rotten else "0") for n in ("n1", "n2"))
    clients = fleet.configure()
    rank = owner(first)
    store(rank, 0, V1)
    view = rank.view if rotten == "n1" else copies(second)
    view.manifest_view(0)[len(ENCODED) - 3] ^= 64
    other = "n2" if rotten == "n1" else "n1"
    assert f"repaired from {other}" in clients[rotten].finding().finding.finding.message
    until(lambda: bytes(view.manifest_view(0)) == ENCODED, "the manifest is whole again")
    view.verify(0)


def test_oversized_manifest_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.layout.manifests.MAX_MANIFEST_BYTES", 10_000)
    with pytest.raises(
        ConfigurationError, match=r"shapes of 1000 tensors .* take \d+ bytes, and a manifest 10000 at most"
    ):
        encode_manifest(manifest_of(1000))
