"""Exact mode: real ranks join and leave, and every number equals that of one process that computes everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule, Resumed
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.exact_training import BATCH, Fault, is_computed, read_step_logs
from tests.support.ranks.node_ranks import NodeRanks, node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.parallel.exact import virtual_rank_training

STEPS, VIRTUAL_RANKS = 36, 7
Row = dict[str, Any]


def numbers(row: Row) -> Row:
    return {key: row[key] for key in ("loss", "norm", "noise", "state")}


def begin_generation(scene: NodeRanks, number: int, ranks: range) -> None:
    """Begin a generation, and wait until all of its ranks have made a step."""
    spec = JobSpec(job=JOB, replicas=1, nproc_per_node=len(ranks))
    scene.form_generation(number, *ranks, spec=spec, restore=RestoreRule())
    scene.wait_for_messages(Resumed, len(ranks), where=lambda m: m.generation == number)


@pytest.mark.promise("exact-mode", "exact-mode-sharded")
@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_four_three_two_and_one_ranks_compute_the_same_bits(forks: ForkPool, tmp_path: Path, sharded: bool) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    forks.start(virtual_rank_training.train_alone, str(alone), STEPS, VIRTUAL_RANKS, sharded).result()
    reference = {row["step"]: row for row in read_step_logs(alone)}
    assert reference.keys() == set(range(1, STEPS + 1))
    faults = (Fault(3, 8, "forward"), Fault(1, 22, "reduced"))
    train = partial(
        virtual_rank_training.train,
        folder=str(together),
        until=STEPS,
        virtual_ranks=VIRTUAL_RANKS,
        sharded=sharded,
        faults=faults,
        last_steps={2: 15, 4: 29},
    )
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, train, vault.run_dir) as scene:
            scene.start(0, 1, 2, 3)
            spec = JobSpec(job=JOB, replicas=1, nproc_per_node=4)
            scene.form_generation(1, 0, 1, 2, 3, spec=spec)
            scene.ranks.pop(3).wait()
            begin_generation(scene, 2, range(3))
            until(lambda: is_computed(together, 2, 15, ranks=3), "step 15")
            begin_generation(scene, 3, range(2))
            scene.ranks.pop(1).wait()
            begin_generation(scene, 4, range(1))
            scene.start(1, 3)
            until(lambda: is_computed(together, 4, 29, ranks=1), "step 29")
            begin_generation(scene, 5, range(4))
            scene.wait_for_messages(RankFinished, 4, where=lambda m: m.generation == 5)
            assert scene.finish() == [0, 0, 0, 0]
    rows = read_step_logs(together)
    worlds = {g: {row["rank"] for row in rows if row["generation"] == g} for g in range(1, 6)}
    assert list(map(len, worlds.values())) == [4, 3, 2, 1, 4]
    differ = [(r["step"], r["rank"]) for r in rows if numbers(r) != numbers(reference[r["step"]])]
    assert not differ, "of all ranks, in every generation"
    assert {row["step"] for row in rows} == reference.keys()
    assert len({row["state"] for row in rows}) == STEPS, "it trained"
    whole_steps_keep_their_samples(rows, reference)


def whole_steps_keep_their_samples(rows: list[Row], reference: dict[int, Row]) -> None:
    """Check that the ranks of a generation load the samples of a step that one rank loads, in the same order."""
    seen: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for row in rows:
        seen.setdefault((row["generation"], row["step"]), []).extend(row["samples"])
    whole = {key: sorted(parts) for key, parts in seen.items() if sum(len(samples) for _, samples in parts) == BATCH}
    assert {step for _, step in whole} >= set(range(1, STEPS + 1)) - {7, 8, 21, 22}
    assert all(parts == reference[step]["samples"] for (_, step), parts in whole.items())


class Grows(nn.Module):
    """A buffer that counts forward passes."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = self.linear(x)
        return out


def alone() -> Run:
    return Run(RankContext(), TrainingSession())


def step_of(run: Run, model: nn.Module) -> None:
    for part in run.parts(run.sampler(100, global_batch=8), 1):
        model(torch.ones(len(part.indices), 2)).sum().backward()


def test_running_statistics_are_refused_unless_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="1 is a BatchNorm1d with running statistics"):
        alone().replicate(model, virtual_ranks=2)
    run = alone()
    model[1].eval()
    step_of(run, run.replicate(model, virtual_ranks=2))


def test_buffer_changing_in_the_forward_pass_is_refused() -> None:
    run = alone()
    model = run.replicate(Grows(), virtual_ranks=2)
    with pytest.raises(ValueError, match="buffer passes changes"):
        step_of(run, model)


def test_ddp_options_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        alone().replicate(nn.Linear(1, 1), virtual_ranks=2, bucket_cap_mb=1)


def test_more_virtual_ranks_than_samples_are_refused() -> None:
    run = alone()
    model = run.replicate(nn.Linear(2, 1), virtual_ranks=9)
    with pytest.raises(ValueError, match="batch of at least 9"):
        step_of(run, model)


def test_step_with_parts_left_early_is_not_finished() -> None:
    run = alone()
    run.replicate(nn.Linear(2, 1), virtual_ranks=3)
    next(run.parts(run.sampler(10, global_batch=4), 1))
    with pytest.raises(RuntimeError, match="left before its end"):
        run.step_finished()


def test_step_without_taken_parts_is_not_finished() -> None:
    run = alone()
    model = run.replicate(nn.Linear(2, 1), virtual_ranks=2)
    step_of(run, model)
    run.step_finished()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="this step did not use run"):
        run.step_finished()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_thawed_and_frozen_parameters_are_averaged_correctly() -> None:
    run = alone()
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    first.requires_grad_(False)
    model = run.replicate(nn.Sequential(first, second), virtual_ranks=2)
    step_of(run, model)
    assert first.weight.grad is None
    first.requires_grad_(True)
    second.requires_grad_(False)
    step_of(run, model)
    assert second.weight.grad is None
    assert gradient_of(first.weight).tolist() == (4.0 * second.weight.detach().T.expand(2, 2)).tolist()


def test_without_virtual_ranks_there_is_one_part() -> None:
    run = alone()
    sampler = run.sampler(10, global_batch=4)
    (part,) = run.parts(sampler, 3)
    assert (part.rank, part.loss_weight, part.indices.tolist()) == (0, 1.0, sampler.indices(3).tolist())
    assert run.mean([torch.tensor(2.5)]).item() == 2.5


def test_partly_used_parameter_has_the_mean_with_zeros() -> None:
    run = alone()
    layers = [nn.Linear(2, 1), nn.Linear(2, 1)]
    model = run.replicate(nn.ModuleList(layers), virtual_ranks=4)
    for part in run.parts(run.sampler(100, global_batch=8), 1):
        layers[part.rank % 2](torch.ones(1, 2)).sum().backward()
    assert [gradient_of(p).tolist() for p in model.parameters()] == [[[0.5, 0.5]], [0.5], [[0.5, 0.5]], [0.5]]
