"""The order in which ranges are requested from nodes, and requested again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from everstep.ids import Version
from everstep.layout.manifests import BLOB_LENGTH_BYTES, LAYOUT_FORMAT, Manifest, StoredBox, TensorInfo, full_box
from everstep.native import DIGEST_BYTES
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import FindingKind
from everstep.wire.framing import VaultChannel
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, Member
from everstep.wire.v1.transfer import Get
from everstep_trainer.restore.restorer import SlotReporter
from everstep_trainer.slots import byte_moves, remote_slots
from everstep_trainer.slots.fetch import NeededBox, ReadSource, RestoreTarget, SlotLoader, plan_reads
from everstep_trainer.slots.local_slots import BadSlot, LocalSlots
from tests.support.fleet.generations import generation
from tests.support.vaults.fake_vault_client import (
    Behaviour,
    fake_vault_client,
    requested_bytes,
    serve,
    serve_like_a_vault,
)

SIZE, AT = 16 << 10, 64 << 10
"""Of a tensor, and from one to the next: bytes."""


def payload(rank: int) -> bytes:
    """Return four tensors of fp32, each filled with a number of its own, and no Python state."""
    parts = [np.full(SIZE // 4, 10 * rank + index, np.float32).tobytes() for index in range(4)]
    return b"".join(part.ljust(AT, b"\0") for part in parts) + bytes(BLOB_LENGTH_BYTES)


def supply(node: str, rank: int, held: Sequence[int]) -> ReadSource:
    catalog = tuple(TensorInfo(name, "float32", 4, (SIZE // 4,), False) for name in ("a", "a.moment", "b", "b.moment"))
    stored = tuple(StoredBox(index, full_box((SIZE // 4,)), AT * place) for place, index in enumerate(held))
    version = Version(1, 1)
    slot = SlotInfo(node=node, rank=rank, version=version, path="", slot=0, replica=False, manifest_digest="")
    return ReadSource(slot, Manifest(LAYOUT_FORMAT, 0, 2, catalog, stored, 4 * AT, 0, 4 * AT + BLOB_LENGTH_BYTES, 0))


def loader_of(vault: Any, targets: Sequence[RestoreTarget]) -> SlotLoader:
    return SlotLoader(vault, "job", Member(rank=0, node="n1", local_rank=0), targets, LocalSlots())


def test_parameters_are_fetched_before_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_slots, "STREAM_COUNT", 1)
    supplies = [supply("n2", 2, (1, 0)), supply("n3", 3, (3, 2))]
    boxes = [full_box((SIZE // 4,))] * 4
    targets = [RestoreTarget(torch.zeros(SIZE // 4), box, is_parameter=i % 2 == 0) for i, box in enumerate(boxes)]
    reads = plan_reads([NeededBox(i, box) for i, box in enumerate(boxes)], [each.manifest for each in supplies])
    with fake_vault_client({2: payload(2), 3: payload(3)}) as vault:
        _, failures = loader_of(vault, targets).load(reads, supplies, blob_from=1)
    assert failures == []
    parameters = {("n2", ((AT, SIZE),)), ("n3", ((AT, SIZE), (4 * AT, BLOB_LENGTH_BYTES)))}  # and the Python state
    assert [set(vault.requests[:2]), set(vault.requests[2:])] == [
        parameters,
        {("n2", ((0, SIZE),)), ("n3", ((0, SIZE),))},
    ]
    assert [float(target.local[0]) for target in targets] == [21.0, 20.0, 31.0, 30.0]


def close_connection(channel: VaultChannel, get: Get, payload: bytes) -> None:
    channel.close()


def send_zeros(channel: VaultChannel, get: Get, payload: bytes) -> None:
    serve(channel, bytes(len(requested_bytes(get, payload))), bytes(DIGEST_BYTES * len(get.ranges)))


@pytest.mark.promise("restored-is-whole")
@pytest.mark.parametrize("wrong", [close_connection, send_zeros])
def test_missing_bytes_are_fetched_from_the_next_holder(wrong: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_moves, "BATCH_BYTES", AT)
    monkeypatch.setattr(remote_slots, "STREAM_COUNT", 1)
    first, second, other = supply("n2", 2, (0, 1, 2)), supply("n4", 2, (0, 1, 2)), supply("n3", 3, (3,))
    box = full_box((SIZE // 4,))
    targets = [RestoreTarget(torch.zeros(SIZE // 4), box) for _ in range(4)]
    wants = [NeededBox(index, box) for index in range(4)]
    with fake_vault_client({2: payload(2), 3: payload(3)}, {"n2": [serve_like_a_vault, wrong]}) as vault:
        loader = loader_of(vault, targets)
        supplies = [first, other]
        _, failures = loader.load(plan_reads(wants, [s.manifest for s in supplies]), supplies, blob_from=1)
        assert [failure.slot.node for failure in failures] == ["n2"]
        supplies = [second, other]
        blob, failures = loader.load(plan_reads(wants, [s.manifest for s in supplies]), supplies, blob_from=1)
        asked = {at // AT for node, ranges in vault.requests for at, _ in ranges if node == "n4"}
    assert (blob, failures) == (b"", [])
    assert asked == {0, 1, 2}
    assert [float(target.local[0]) for target in targets] == [20.0, 21.0, 22.0, 30.0]
    assert all(bool((target.local == target.local[0]).all()) for target in targets)
    assert loader.bytes_by_source == {"own": 0, "node": 0, "remote": 4 * SIZE, "parity": 0}


def test_corrupt_transfer_is_reported() -> None:
    reports: list[FindingRaised] = []
    spec = generation(3, ranks=[("n1", 0)])
    report = SlotReporter(spec, spec.roster[0], reports.append, SYSTEM_CLOCK)
    slot = supply("n2", 2, (0,)).slot
    report(BadSlot(slot, "chunk 3 is rotten", is_corrupt=True))  # its own vault has told
    assert reports == []
    report(remote_slots.BadTransfer(slot, "did not hash right", is_corrupt=True))
    finding = reports[0].finding
    assert (finding.kind, finding.subject) == (FindingKind.TRANSFER_CORRUPT, "n2")
    assert finding.evidence == {"rank": "2", "version": "1:1", "received_by": "n1"}
