"""Tracked objects that differ between ranks are reported once, with advice."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep_trainer.slots.layout_exchange import COMPARE_WINDOW, MAX_FIELDS, PythonStateComparison
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.settable_state import SettableState
from tests.support.vaults.vault_process import vaults


class Ranks:
    """The comparison of Python state on several ranks in one generation."""

    def __init__(self, count: int) -> None:
        self.store = HashStore()
        self.ranks = [PythonStateComparison(self.store, rank, count, {"job": "job"}) for rank in range(count)]

    def store_version(self, step: int, *states: Mapping[str, object], modules: Any = None) -> None:
        for rank, (alike, objects) in enumerate(zip(self.ranks, states, strict=True)):
            module = modules[rank] if modules is not None else nn.Linear(2, 2)
            tracked = TrackedState({"model": module, **objects})
            layout = tracked.layout(tracked.tensors(), rank, len(self.ranks))
            alike.compare(step, layout, tracked.capture())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.WARNING):
        yield SimpleNamespace(messages=lambda: [record.message for record in caplog.records])


def test_differing_state_is_named_once_with_rank_and_advice(warnings: Any) -> None:
    ranks = Ranks(3)
    for step in (1, 2, 3):
        ranks.store_version(
            step,
            *(
                {"cursor": SettableState({"file": "a", "at": 5 * rank}), "other": SettableState([1])}
                for rank in range(3)
            ),
        )
    (warning,) = warnings.messages()
    assert "cursor.at of rank 1 at step 1 differs" in warning
    assert "cursor.file" not in warning
    assert "run.track(..., per_rank=['cursor'])" in warning


def test_per_rank_state_causes_no_warning(warnings: Any) -> None:
    ranks = Ranks(2)
    for step in (1, 2):
        ranks.store_version(
            step, *(wrap_per_rank({"cursor": SettableState({"at": at})}, ["cursor"], at, 2) for at in range(2))
        )
    assert warnings.messages() == []


@pytest.mark.parametrize(
    "make", [lambda at: [at], lambda at: {f"f{n}": at for n in range(MAX_FIELDS + 1)}, torch.tensor]
)
def test_later_difference_is_found_in_the_next_window(make: Any, warnings: Any) -> None:
    ranks = Ranks(2)
    ranks.store_version(1, {"a": SettableState(make(1))}, {"a": SettableState(make(1))})
    ranks.store_version(2, {"a": SettableState(make(1))}, {"a": SettableState(make(2))})
    assert warnings.messages() == []
    for step in (COMPARE_WINDOW, COMPARE_WINDOW + 1):
        ranks.store_version(step, {"a": SettableState(make(1))}, {"a": SettableState(make(2))})
    (warning,) = warnings.messages()
    assert f": a of rank 1 at step {COMPARE_WINDOW} differs" in warning


def test_training_ranks_are_warned_during_training(program_forks: ForkPool, warnings: Any) -> None:
    spec, store = generation(1, ranks=[("n1", 0), ("n1", 1)]), HashStore()
    with vaults(program_forks) as fleet, ExitStack() as stack:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        snapshotters = []
        for member in spec.roster:
            client = VaultClient(str(vault.run_dir / "vault.sock"))
            stack.callback(client.close)
            state = TrackedState({"model": nn.Linear(64, 64), "cursor": SettableState({"at": member.rank})})
            snapshots = Snapshotter(client, state, spec, member, store, lambda _: None)
            stack.callback(snapshots.close, finish=False)
            snapshotters.append(snapshots)
        for step in range(1, 6):
            for snapshots in snapshotters:
                snapshots.wait()
            for snapshots in snapshotters:
                snapshots.begin(step)
        until(warnings.messages, "a rank logs the difference")
    (warning,) = warnings.messages()
    assert "tracked state differs between ranks: cursor.at of rank" in warning
