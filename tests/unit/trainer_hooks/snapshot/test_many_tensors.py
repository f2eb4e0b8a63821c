"""A rank whose manifest is larger than a frame, stored, copied to another node, and restored from there on a third."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
import torch.distributed as dist
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore import agreement
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule, VersionSealed
from everstep.wire.v1.transfer import MAX_TRANSFER_FRAME_BYTES
from tests.support.forked import ForkPool
from tests.support.generations import JOB, generation
from tests.support.vaults import Vaults, map_segment, vaults
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MANY = 2500
PATH = "module_of_" * 700
"""A prefix so long that the names and shapes of ``MANY`` tensors are more than a frame may have."""


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    with vaults(program_forks) as running:
        for node in ("n1", "n2", "n3"):
            running.start(node, "--scrub-interval-s", "0")
        running.configure()
        yield running


def stage(count: int, value: float) -> nn.Module:
    """Parameters of a number each: ``value`` and which one it is."""
    module = nn.Module()
    numbers = torch.arange(float(count)) + value
    for index in range(count):
        module.register_parameter(
            f"{PATH}_{index}", nn.Parameter(numbers[index : index + 1].clone(), requires_grad=False)
        )
    return module


def test_manifest_larger_than_a_frame_is_restored_remotely(fleet: Vaults, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a busy machine: the only node with the version answers too late at first.
    monkeypatch.setattr(agreement, "FORMER_NODE_TIMEOUT_S", 1e-6)
    clients = {vault.node: VaultClient(str(vault.run_dir / "vault.sock"), timeout_s=60.0) for vault in fleet.all}
    try:
        _lose_and_restore(fleet, clients)
    finally:
        for client in clients.values():
            client.close()


def _lose_and_restore(fleet: Vaults, clients: dict[str, VaultClient]) -> None:
    spec = generation(1, ranks=[("n1", 0), ("n2", 0)], spec=JobSpec(job=JOB, max_nodes=2, nproc_per_node=1))
    spec = msgspec.structs.replace(spec, replica_nodes={"n1": ("n2",), "n2": ("n1",)})
    report = _store(clients, spec)
    assert report.durable
    assert report.full_copies == ("n2",)
    view = map_segment(fleet.segments / "n2" / JOB / "replica-0")
    assert len(next(bytes(view.manifest(slot)) for slot, _ in view.sealed_slots())) > MAX_TRANSFER_FRAME_BYTES
    fleet.all[0].kill()
    after = generation(2, ranks=[("n3", 0)], restore=RestoreRule(floor=report.version))
    after = msgspec.structs.replace(after, holders=fleet.holders()[1:])
    empty = stage(MANY, -1.0)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    restoration = Restoration(clients["n3"], after, after.roster[0], dist.HashStore(), on_finding=lambda _: None)
    result = restoration.fill(TrackedState({"first": empty, "second": stage(1, 0.0)}))
    assert result.version == report.version
    assert torch.equal(torch.cat(list(empty.parameters())), torch.arange(float(MANY)) + 1.0)
    assert result.bytes_by_source["remote"] == 4 * (MANY + 1)


def _store(clients: dict[str, VaultClient], spec: GenerationSpec) -> VersionSealed:
    """Both ranks' first version; the report of the first one's."""
    store, told, reports = dist.HashStore(), threading.Event(), list[VersionSealed]()

    def hear(report: VersionSealed) -> None:
        reports.append(report)
        told.set()

    states = [TrackedState({"first": stage(MANY, 1.0)}), TrackedState({"second": stage(1, 5.0)})]
    ranks = [
        Snapshotter(clients[member.node], state, spec, member, store, heard)
        for state, member, heard in zip(states, spec.roster, (hear, lambda _: None), strict=True)
    ]

    def stored() -> bool:
        for rank in ranks:  # as the next step would, if the plan took longer than a step is held up for
            rank.begin(1)
            rank.wait()
        return told.wait(5.0)

    until(stored, "the version is sealed and copied", 120.0)
    for rank in ranks:
        rank.close(finish=True)
    assert reports[0].version == Version(1, 1)
    return reports[0]
