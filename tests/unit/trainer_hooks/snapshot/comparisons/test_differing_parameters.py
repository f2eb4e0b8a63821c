"""Ranks whose digests differ name the parameters that do, once the controller asks them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.layout.manifests import Box
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import FindingRaised, JobSpec, VersionSealed
from everstep_trainer.slots.copy import ParameterKey
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot import differing_parameters as module
from everstep_trainer.snapshot.differing_parameters import ParameterComparison
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import vaults

Digests = dict[ParameterKey, str]


def key(name: str, group: str = "world", offset: int = 0) -> ParameterKey:
    return ParameterKey(name, Box((offset,), (4,)), group)


def compare(*ranks: Digests, kinds: str = "AAAA", asked: Iterable[int] | None = None) -> list[str]:
    """Return what each rank says, given the digests of all that take part."""
    store, asked = HashStore(), range(len(ranks)) if asked is None else asked
    parts = [
        ParameterComparison(store, rank, SYSTEM_CLOCK, threading.Event(), bool, kinds[rank], {})
        for rank in range(len(ranks))
    ]
    for part in parts:
        part.request(asked)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(lambda part, digests: part.differing(7, digests) if part.is_due else "", parts, ranks)]


def test_lowest_rank_names_parameters_that_differ() -> None:
    first, second = {key("a"): "1", key("b"): "2", key("c"): "3"}, {key("a"): "1", key("b"): "x", key("c"): "y"}
    assert compare(first, first, second) == ["b, c", "", ""]
    assert compare(first, first, second, asked=(1, 2)) == ["", "b, c", ""]
    assert compare(first, first) == ["", ""]


def test_only_parts_that_should_be_equal_are_compared() -> None:
    """Shards differ, and so may ranks of different kinds."""
    assert compare({key("a"): "1"}, {key("a", offset=4): "2"}) == ["", ""]
    assert compare({key("a"): "1"}, {key("a", group="0,2"): "2"}) == ["", ""]
    assert compare({key("a"): "1"}, {key("a"): "2"}, kinds="AB") == ["", ""]


def test_many_names_are_counted() -> None:
    names = [f"layers.{number}.weight" for number in range(20)]
    (words, _) = compare({key(name): "1" for name in names}, {key(name): "2" for name in names})
    assert words == f"{', '.join(names[:8])} and 12 more"


def test_comparison_without_the_others_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    part = ParameterComparison(HashStore(), 0, SYSTEM_CLOCK, threading.Event(), bool, "A", {})
    part.request((1, 0))
    due = []
    for step in range(module.MAX_ATTEMPTS + 1):
        due.append(part.is_due)
        assert part.differing(step, {key("a"): "1"}) == ""
    assert due == [*[True] * module.MAX_ATTEMPTS, False]


def test_report_names_parameters_at_the_candidate(program_forks: ForkPool) -> None:
    spec, store = generation(1, ranks=[("n1", 0), ("n1", 1)], spec=JobSpec(job=JOB, nproc_per_node=2)), HashStore()
    reports: list[VersionSealed | FindingRaised] = []
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[1].bias.add_(1.0)
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            snapshotters = [
                Snapshotter(client, TrackedState({"model": model}), spec, member, store, reports.append)
                for model, member in zip(models, spec.roster, strict=True)
            ]
            for step in range(1, 4):
                for snapshots in snapshotters:
                    snapshots.wait()
                    snapshots.update_versions(None, 2, compared_ranks=(0, 1))
                    snapshots.begin(step)
            for snapshots in snapshotters:
                snapshots.wait()
                snapshots.close(finish=True)
        finally:
            client.close()
    named = {(r.rank, r.version.step): r.differing_parameters for r in reports if isinstance(r, VersionSealed)}
    assert named[0, 2] == "model.bias"
    assert {at for at, names in named.items() if names} == {(0, 2)}
