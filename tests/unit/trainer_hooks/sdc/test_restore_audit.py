"""Audits of restores: a tensor that differs from the digest stored with its copy is not used for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.layout.manifests import LAYOUT_FORMAT, Manifest, StoredBox, TensorInfo, decode_manifest, full_box
from everstep.vocabulary import AuditKind, AuditRole, FindingKind
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, Member, RestoreRule
from everstep_trainer.digests.digest import combined_digest
from everstep_trainer.digests.piece_digests import digest_at_places, separate_digests
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.sdc import restore_audit
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.slots.fetch import NeededBox, ReadSource, RestoreTarget, SlotLoader, plan_reads
from everstep_trainer.slots.local_slots import LocalSlots
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import LoneRank, lone_rank
from tests.support.ranks.simulated_gpu import move_to_gpu, on_gpu, on_host, simulate_cuda
from tests.support.vaults.fake_vault_client import fake_vault_client

NAMED = "model.0.weight"


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as rank:
        yield rank


def built() -> nn.Sequential:
    return nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 1).to(torch.bfloat16))


def store(rank: LoneRank, *, audit: bool = True, gpu: bool = False) -> nn.Sequential:
    """Store two steps, both of them candidates; return the model of the second."""
    spec, model = generation(1), built()
    tracked = move_to_gpu(model) if gpu else model
    snapshots = Snapshotter(
        rank.client,
        TrackedState({"model": tracked}),
        spec,
        spec.roster[0],
        HashStore(),
        lambda _: None,
        options=SnapshotOptions(copy_audits=AuditOptions(share=1.0) if audit else None),
        on_mismatch=lambda _: None,
    )
    for step in (1, 2):
        snapshots.wait()
        snapshots.update_versions(None, step)
        with torch.no_grad():
            for parameter in model.parameters():
                (on_host(parameter) if gpu else parameter).add_(step)
        snapshots.begin(step)
        snapshots.wait()
        assert snapshots._last is not None
        assert snapshots._last.done.wait(60)
    snapshots.close(finish=True)
    return model


class AuditedRestore:
    """A restore with audits, and its mismatches and findings."""

    def __init__(self, rank: LoneRank) -> None:
        spec = generation(2, restore=RestoreRule())
        self.mismatches: list[Mismatch] = []
        self.findings: list[FindingRaised] = []
        self.model = built()
        restoration = Restoration(rank.client, spec, spec.roster[0], HashStore(), on_finding=self.findings.append)
        self.version = restoration.fill(TrackedState({"model": self.model}), self.mismatches.append).version

    def equals(self, other: nn.Module) -> bool:
        pairs = zip(self.model.parameters(), other.parameters(), strict=True)
        return all(torch.equal(expected, on_host(found)) for expected, found in pairs)


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.uint8).view(-1)[3] ^= 64


def flip_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first copy from a slot change a bit of a live tensor."""
    read = SlotLoader._read_local
    flipped: list[str] = []

    def wrong(loader: SlotLoader, source: ReadSource, reads: Any, with_blob: bool) -> bytes:
        result = read(loader, source, reads, with_blob)
        for needed in reads:
            if source.tensor(needed).name == NAMED and not flipped:
                flipped.append(NAMED)
                flip(loader._targets[needed.needed_index].local)
        return result

    monkeypatch.setattr(SlotLoader, "_read_local", wrong)


@pytest.mark.parametrize("gpu", [False, True])
def test_slot_keeps_the_digests_of_its_tensors(rank: LoneRank, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    if gpu:
        simulate_cuda(monkeypatch)
        monkeypatch.setattr(
            "everstep_trainer.slots.copy.combined_digest",
            lambda sources: on_gpu(combined_digest([on_host(source) for source in sources])),
        )
    model = store(rank, gpu=gpu)
    view = rank.view()
    slot = rank.slot_of(Version(1, 2))
    manifest = decode_manifest(view.manifest(slot))
    start, length = manifest.digests_range
    is_kept, *digests = torch.frombuffer(bytearray(view.payload(slot)[start : start + length]), dtype=torch.int64)
    live = {f"model.{name}": on_host(parameter) for name, parameter in model.named_parameters()}
    expected = separate_digests([live[manifest.catalog[stored.tensor].name] for stored in manifest.stored])
    assert is_kept
    assert torch.stack(digests).tolist() == expected.tolist()


def test_tensor_restored_wrongly_once_is_restored_again(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    model = store(rank)
    flip_first_read(monkeypatch)
    found = AuditedRestore(rank)
    assert found.version == Version(1, 2)
    assert found.equals(model)
    (mismatch,) = found.mismatches
    assert (mismatch.audit, mismatch.role, mismatch.owner) == (AuditKind.CHECKPOINT, AuditRole.OWNER, 0)
    assert (mismatch.step, mismatch.unit) == (2, "restore of version 1:2")
    assert mismatch.original != mismatch.digest
    assert mismatch.difference.startswith(f"{NAMED}: 1 of 300000 elements differ")


def test_tensor_that_stays_wrong_refuses_the_version(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    store(rank)
    lost: list[int] = []

    def faulty(tensors: list[torch.Tensor], places: list[int]) -> torch.Tensor:
        """A byte that does not keep what is written to it, until the version is refused."""
        for tensor in tensors:
            if tensor.shape == (500, 600) and len(lost) < 3:  # compared with all, alone, and when it was filled again
                lost.append(0)
                tensor.detach().view(torch.uint8)[0, 3] = 0
        return digest_at_places(tensors, places)

    monkeypatch.setattr(restore_audit, "digest_at_places", faulty)
    found = AuditedRestore(rank)
    assert found.version == Version(1, 1)
    assert [mismatch.unit for mismatch in found.mismatches] == [
        "restore of version 1:2",
        "second restore of version 1:2",
    ]
    assert all(mismatch.difference.startswith(f"{NAMED}: 1 of 300000 elements differ") for mismatch in found.mismatches)


def test_slot_with_other_bytes_accuses_no_rank(rank: LoneRank) -> None:
    """The bytes changed after they were compared, before they were hashed."""
    store(rank)
    view = rank.view()
    slot = rank.slot_of(Version(1, 2))
    header = view.header(slot)
    assert header is not None
    view.payload(slot)[decode_manifest(view.manifest(slot)).stored[0].offset + 40] ^= 4
    view._seal(slot, header, b"".join(view.compute_digests(slot, header)))
    found = AuditedRestore(rank)
    assert found.version == Version(1, 1)
    assert not found.mismatches
    (finding,) = (report.finding for report in found.findings)
    assert finding.kind == FindingKind.SLOT_CORRUPT
    assert "is not what was copied into it" in finding.message
    assert finding.source == "digests of the tensors, kept when they were copied"


def test_digests_come_with_the_bytes_of_another_node() -> None:
    parts = [torch.full((256,), float(number)) for number in range(3)]
    digests = separate_digests(parts)
    payload = b"".join(part.numpy().tobytes() for part in parts) + bytes(64)
    mark = torch.cat([torch.ones(1, dtype=torch.int64), digests])
    catalog = tuple(TensorInfo(name, "float32", 4, (256,), False) for name in "abc")
    stored = tuple(StoredBox(number, full_box((256,)), 1024 * number) for number in range(3))
    size = len(payload) + mark.nbytes
    manifest = Manifest(LAYOUT_FORMAT, 1, 2, catalog, stored, 3072, 0, size, 0, len(payload))
    slot = SlotInfo(node="n2", rank=1, version=Version(1, 1), path="", slot=0, replica=True, manifest_digest="")
    boxes = [full_box((length,)) for length in (256, 256, 128)]  # of the last a part, which has no digest
    targets = [RestoreTarget(torch.zeros(box.size), box) for box in boxes]
    reads = plan_reads([NeededBox(number, box) for number, box in enumerate(boxes)], [manifest])
    with fake_vault_client({1: payload + mark.numpy().tobytes()}) as vault:
        member = Member(rank=0, node="n1", local_rank=0)
        loader = SlotLoader(vault, "job", member, targets, LocalSlots(), reads_digests=True)  # type: ignore[arg-type]
        _, failures = loader.load(reads, [ReadSource(slot, manifest)], 0)
        first = dict(loader.bytes_by_source)
        loader.drop(slot)
        for target in targets:
            target.local.fill_(9)
        _, again = loader.load(reads, [ReadSource(slot, manifest)], 0)
    assert not failures + again
    assert loader.bytes_by_source == first
    assert all(
        torch.equal(target.local, part[: len(target.local)]) for target, part in zip(targets, parts, strict=True)
    )
    assert [piece.digest for piece in loader.filled_pieces] == digests[:2].tolist()
    assert not restore_audit.find_wrong(loader.filled_pieces)
    flip(targets[1].local)
    assert [piece.name for piece in restore_audit.find_wrong(loader.filled_pieces)] == ["b"]
