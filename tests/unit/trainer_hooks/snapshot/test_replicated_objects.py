"""Objects that are tracked as alike on all ranks and are not: who tracks them hears of it, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.snapshot.exchange import COMPARE_WINDOW, MAX_FIELDS, PythonStateComparison
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.given_state import GivenState
from tests.support.vaults import vaults
from tests.support.waiting import until


class Ranks:
    """Some ranks' parts in the comparison, in one generation."""

    def __init__(self, count: int) -> None:
        self.store = dist.HashStore()
        self.ranks = [PythonStateComparison(self.store, rank, count, {"job": "job"}) for rank in range(count)]

    def store_version(self, step: int, *states: dict[str, object], modules: Any = None) -> None:
        for rank, (alike, objects) in enumerate(zip(self.ranks, states, strict=True)):
            module = modules[rank] if modules is not None else nn.Linear(2, 2)
            tracked = TrackedState({"model": module, **objects})
            layout = tracked.layout(tracked.tensors(), rank, len(self.ranks))
            alike.compare(step, layout, tracked.capture())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.WARNING):
        yield SimpleNamespace(said=lambda: [record.message for record in caplog.records])


def test_differing_state_is_named_once_with_rank_and_advice(warnings: Any) -> None:
    ranks = Ranks(3)
    for step in (1, 2, 3):
        ranks.store_version(
            step,
            *({"cursor": GivenState({"file": "a", "at": 5 * rank}), "other": GivenState([1])} for rank in range(3)),
        )
    (said,) = warnings.said()
    assert "cursor.at of rank 1 at step 1 differs" in said
    assert "cursor.file" not in said
    assert "run.track(..., per_rank=['cursor'])" in said


def test_equal_state_in_any_field_order_causes_no_warning(warnings: Any) -> None:
    ranks = Ranks(2)
    for step in (1, 2, COMPARE_WINDOW, COMPARE_WINDOW + 1):
        ranks.store_version(
            step, {"a": GivenState({"x": 1, "y": (2, {3})})}, {"a": GivenState({"y": (2, {3}), "x": 1})}
        )
    assert warnings.said() == []


def test_per_rank_state_causes_no_warning(warnings: Any) -> None:
    ranks = Ranks(2)
    for step in (1, 2):
        ranks.store_version(
            step, *(wrap_per_rank({"cursor": GivenState({"at": at})}, ["cursor"], at, 2) for at in range(2))
        )
    assert warnings.said() == []


def test_ranks_of_other_stages_are_not_compared(warnings: Any) -> None:
    ranks, stages = Ranks(2), [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    for step in (1, 2):
        ranks.store_version(step, {"scale": GivenState({"at": 1})}, {"scale": GivenState({"at": 2})}, modules=stages)
    assert warnings.said() == []


@pytest.mark.parametrize(
    "make", [lambda at: [at], lambda at: {f"f{n}": at for n in range(MAX_FIELDS + 1)}, torch.tensor]
)
def test_later_difference_is_found_in_the_next_window(make: Any, warnings: Any) -> None:
    ranks = Ranks(2)
    ranks.store_version(1, {"a": GivenState(make(1))}, {"a": GivenState(make(1))})
    ranks.store_version(2, {"a": GivenState(make(1))}, {"a": GivenState(make(2))})
    assert warnings.said() == []
    for step in (COMPARE_WINDOW, COMPARE_WINDOW + 1):
        ranks.store_version(step, {"a": GivenState(make(1))}, {"a": GivenState(make(2))})
    (said,) = warnings.said()
    assert f": a of rank 1 at step {COMPARE_WINDOW} differs" in said


def test_training_ranks_are_warned_during_training(program_forks: ForkPool, warnings: Any) -> None:
    spec, store = generation(1, ranks=[("n1", 0), ("n1", 1)]), dist.HashStore()
    with vaults(program_forks) as fleet, ExitStack() as stack:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        snapshotters = []
        for member in spec.roster:
            client = VaultClient(str(vault.run_dir / "vault.sock"))
            stack.callback(client.close)
            state = TrackedState({"model": nn.Linear(64, 64), "cursor": GivenState({"at": member.rank})})
            snapshots = Snapshotter(client, state, spec, member, store, lambda _: None)
            stack.callback(snapshots.close, finish=False)
            snapshotters.append(snapshots)
        for step in range(1, 6):
            for snapshots in snapshotters:
                snapshots.wait()
            for snapshots in snapshotters:
                snapshots.begin(step)
        until(warnings.said, "somebody is told")
    (said,) = warnings.said()
    assert "tracked state differs between ranks: cursor.at of rank" in said
