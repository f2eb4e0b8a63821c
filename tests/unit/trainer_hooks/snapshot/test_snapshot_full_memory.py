"""If memory for slots is short, training continues, the log shows the arithmetic, and stored versions are kept."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.slots.vault_client import VaultClient
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.lone_rank import LoneRank
from tests.support.vaults.vault_process import vaults

ROOM_BYTES = 1 << 20
"""For five slots of the model as it is, and not of one with a larger layer beside it."""


@pytest.mark.promise("memory-limit")
def test_full_memory_is_logged_with_arithmetic_and_training_runs(
    program_forks: ForkPool, caplog: pytest.LogCaptureFixture
) -> None:
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", "20000")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        rank = LoneRank(fleet, client)
        try:
            with caplog.at_level(logging.WARNING):
                rank.steps(1, 3)
        finally:
            client.close()
    assert "in 2 slots per rank: training continues" in caplog.text
    assert caplog.text.count("memory limit 20000") == 1, "once, and not for each step"
    assert "memory limit 20000" in caplog.text


def test_grown_model_without_memory_keeps_the_last_version(
    program_forks: ForkPool, caplog: pytest.LogCaptureFixture
) -> None:
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", str(ROOM_BYTES))
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        rank = LoneRank(fleet, client)
        try:
            snapshots = rank.snapshotter(1)
            for step in (1, 2, 3):
                rank.step(snapshots, step)
            rank.model.register_parameter("more", nn.Parameter(torch.ones(ROOM_BYTES // 4)))
            with caplog.at_level(logging.WARNING):
                for step in (4, 5):
                    rank.step(snapshots, step)
                snapshots.close(finish=True)
            assert "training continues" in caplog.text
            assert f"memory limit {ROOM_BYTES}" in caplog.text
            assert max(rank.sealed()) == Version(1, 3)
            result = rank.restore(2, RestoreRule())
        finally:
            client.close()
    assert result.version == Version(1, 3)
    assert torch.equal(rank.model.weight, torch.full((64, 64), 3.0))


def test_grown_model_falls_back_to_two_slots_and_keeps_commits(
    program_forks: ForkPool,
) -> None:
    """Two larger slots do not fit beside all five of before, but beside two of them."""
    limit = 500 << 10
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0", "--memory-limit", str(limit))
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        rank = LoneRank(fleet, client)
        try:
            snapshots = rank.snapshotter(1)
            for step in (1, 2, 3):
                rank.step(snapshots, step)
            until(lambda: max(rank.sealed()) == Version(1, 3), "the third step is stored")
            before = rank.path.stat().st_size
            assert rank.view().slots == 5
            snapshots.update_versions(Version(1, 1), 6)
            rank.model.register_parameter("more", nn.Parameter(torch.ones(32 << 10)))
            for step in (4, 5, 6, 7):
                rank.step(snapshots, step)
            snapshots.close(finish=True)
            assert rank.view().slots == 2
            assert rank.sealed() == {Version(1, 1), Version(1, 6)}, "it was the only one that was announced"
            assert before + rank.path.stat().st_size > limit
            for slot in (0, 1):
                rank.view().verify(slot)
        finally:
            client.close()
