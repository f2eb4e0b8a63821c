"""Exact mode: real ranks come and go, and every number is that of one process that computes everything."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from torch import nn

from everstep.wire.v1.training import JobSpec, RankFinished, RestoreRule, Resumed
from tests.support import virtual_training
from tests.support.exact_training import BATCH, Fault, reached, read_diaries
from tests.support.generations import JOB
from tests.support.stage import Stage, stage
from tests.support.vaults import vaults
from tests.support.waiting import until

STEPS, VIRTUAL_RANKS = 36, 7
Row = dict[str, Any]


def numbers(row: Row) -> Row:
    return {key: row[key] for key in ("loss", "norm", "noise", "state")}


def go_on(scene: Stage, number: int, ranks: range) -> None:
    """The next generation; returns when all of its ranks have made a step."""
    spec = JobSpec(job=JOB, replicas=1, nproc_per_node=len(ranks))
    scene.form(number, *ranks, spec=spec, restore=RestoreRule())
    scene.heard(Resumed, len(ranks), where=lambda m: m.generation == number)


@pytest.mark.promise("exact-mode", "exact-mode-sharded")
@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_four_three_two_and_one_ranks_compute_the_same_bits(forks, tmp_path, sharded):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    forks.start(virtual_training.train_alone, str(alone), STEPS, VIRTUAL_RANKS, sharded).result()
    reference = {row["step"]: row for row in read_diaries(alone)}
    assert reference.keys() == set(range(1, STEPS + 1))
    faults = (Fault(3, 8, "forward"), Fault(1, 22, "reduced"))
    train = partial(
        virtual_training.train,
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
        with stage(forks, train, vault.run_dir) as scene:
            scene.start(0, 1, 2, 3)
            spec = JobSpec(job=JOB, replicas=1, nproc_per_node=4)
            scene.form(1, 0, 1, 2, 3, spec=spec)
            scene.ranks.pop(3).wait()
            go_on(scene, 2, range(3))
            until(lambda: reached(together, 2, 15, ranks=3), "step 15")
            go_on(scene, 3, range(2))
            scene.ranks.pop(1).wait()
            go_on(scene, 4, range(1))
            scene.start(1, 3)
            until(lambda: reached(together, 4, 29, ranks=1), "step 29")
            go_on(scene, 5, range(4))
            scene.heard(RankFinished, 4, where=lambda m: m.generation == 5)
            assert scene.finish() == [0, 0, 0, 0]
    rows = read_diaries(together)
    worlds = {g: {row["rank"] for row in rows if row["generation"] == g} for g in range(1, 6)}
    assert list(map(len, worlds.values())) == [4, 3, 2, 1, 4]
    differ = [(r["step"], r["rank"]) for r in rows if numbers(r) != numbers(reference[r["step"]])]
    assert not differ, "of all ranks, in every generation"
    assert {row["step"] for row in rows} == reference.keys()
    assert len({row["state"] for row in rows}) == STEPS, "it trained"
    whole_steps_keep_their_samples(rows, reference)


def whole_steps_keep_their_samples(rows: list[Row], reference: dict[int, Row]) -> None:
    """What the ranks of a generation saw of a step is what one rank sees of it, in its order."""
    seen: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for row in rows:
        seen.setdefault((row["generation"], row["step"]), []).extend(row["samples"])
    whole = {key: sorted(parts) for key, parts in seen.items() if sum(len(samples) for _, samples in parts) == BATCH}
    assert {step for _, step in whole} >= set(range(1, STEPS + 1)) - {7, 8, 21, 22}
    assert all(parts == reference[step]["samples"] for (_, step), parts in whole.items())


class Grows(nn.Module):
    """A buffer that counts forward passes."""

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


def test_running_statistics_are_refused_unless_frozen():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="1 is a BatchNorm1d with running statistics"):
        alone().replicate(model, virtual_ranks=2)
    run = alone()
    model[1].eval()
    step_of(run, run.replicate(model, virtual_ranks=2))


def test_buffer_changing_in_the_forward_pass_is_refused():
    run = alone()
    model = run.replicate(Grows(), virtual_ranks=2)
    with pytest.raises(ValueError, match="buffer passes changes"):
        step_of(run, model)


def test_sparse_gradients_are_refused_by_name():
    with pytest.raises(TypeError, match="0 has sparse gradients"):
        alone().replicate(nn.Sequential(nn.Embedding(4, 2, sparse=True)), virtual_ranks=2)


def test_ddp_options_are_refused_by_name():
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        alone().replicate(nn.Linear(1, 1), virtual_ranks=2, bucket_cap_mb=1)


def test_more_virtual_ranks_than_samples_are_refused():
    run = alone()
    model = run.replicate(nn.Linear(2, 1), virtual_ranks=9)
    with pytest.raises(ValueError, match="batch of at least 9"):
        step_of(run, model)


def test_step_with_parts_left_early_is_not_finished():
    run = alone()
    run.replicate(nn.Linear(2, 1), virtual_ranks=3)
    next(run.parts(run.sampler(10, global_batch=4), 1))
    with pytest.raises(RuntimeError, match="left before its end"):
        run.step_finished()


def test_step_without_taken_parts_is_not_finished():
    run = alone()
    model = run.replicate(nn.Linear(2, 1), virtual_ranks=2)
    step_of(run, model)
    run.step_finished()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="this step did not use run"):
        run.step_finished()


def test_thawed_and_frozen_parameters_are_averaged_correctly():
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
    assert first.weight.grad.tolist() == (4.0 * second.weight.detach().T.expand(2, 2)).tolist()


def test_without_virtual_ranks_there_is_one_part():
    run = alone()
    sampler = run.sampler(10, global_batch=4)
    (part,) = run.parts(sampler, 3)
    assert (part.rank, part.loss_weight, part.indices.tolist()) == (0, 1.0, sampler.indices(3).tolist())
    assert run.mean([torch.tensor(2.5)]).item() == 2.5


def test_partly_used_parameter_has_the_mean_with_zeros():
    run = alone()
    model = run.replicate(nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]), virtual_ranks=4)
    for part in run.parts(run.sampler(100, global_batch=8), 1):
        model[part.rank % 2](torch.ones(1, 2)).sum().backward()
    assert [p.grad.tolist() for p in model.parameters()] == [[[0.5, 0.5]], [0.5], [[0.5, 0.5]], [0.5]]


def test_leftover_gradients_do_not_count():
    run = alone()
    model = run.replicate(nn.Linear(2, 1), virtual_ranks=2)
    model.weight.grad = torch.full((1, 2), 7.0)
    step_of(run, model)
    assert model.weight.grad.tolist() == [[4.0, 4.0]]
