"""Losses that are NaN or jump: no update, and a return to an earlier version, with or without the batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.vocabulary import Finding, FindingKind, Mode, NodeState, Severity
from everstep.wire.v1.training import FindingRaised, JobSpec, RankFinished, RestoreRule
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.session.loss_guard import GuardOptions, LossDiverged
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.generations import JOB
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.exact_training import Fault, read_step_logs
from tests.support.ranks.node_ranks import node_ranks
from tests.support.vaults.vault_process import vaults
from tests.unit.trainer_hooks.session import guarded_training
from tests.unit.trainer_hooks.session.guarded_training import BadData

NAN = float("nan")
ALL = range(1, 41)


def alone(
    folder: Path, updates: Collection[int] = ALL, bad: BadData | None = None, **options: Any
) -> list[dict[str, Any]]:
    folder.mkdir()
    guarded_training.train(Run(RankContext(), TrainingSession()), str(folder), updates, bad, **options)
    return sorted(read_step_logs(folder), key=lambda row: row["step"])


def end(rows: list[dict[str, Any]]) -> str:
    return str(rows[-1]["state"])


def test_guard_changes_nothing_without_bad_losses(tmp_path: Path) -> None:
    rows = alone(tmp_path / "guarded", rollback_copies=2, copy_every=3)
    assert [row["data_step"] for row in rows] == list(ALL)
    assert end(rows) == end(alone(tmp_path / "free", rollback_copies=0))
    assert rows[-1]["records"] == []


@pytest.mark.slow
@pytest.mark.promise("guard-rollback")
@pytest.mark.parametrize(
    ("back", "every", "value"), [(1, 1, NAN), (1, 10, float("inf")), (2, 5, 1e4), (3, 1, NAN), (5, 7, 1e4)]
)
def test_persistently_bad_batch_is_skipped_without_trace(tmp_path: Path, back: int, every: int, value: float) -> None:
    rows = alone(tmp_path / "bad", bad=BadData([23], value), policy="skip", rollback_copies=back, copy_every=every)
    refused = [row for row in rows if not row["allowed"]]
    assert [row["data_step"] for row in refused] == [23]
    kept = [1, *(step + 1 for step in range(1, 22) if step % every == 0)]
    (record,) = rows[-1]["records"]
    assert record["back_to"] == kept[-back:][0], "of those from which a good loss came, that many back or the oldest"
    assert (record["data_step"], record["policy"]) == (23, "skip")
    applied = applied_steps(rows)
    assert applied == [step for step in ALL if step != 23]
    assert rows[-1]["state"] == reference(tmp_path, applied)


def applied_steps(rows: list[dict[str, Any]]) -> list[int]:
    """Return the data steps whose updates are in the final state, without those that a rollback undid."""
    applied: list[int] = []
    for row in rows:
        if row["allowed"]:
            applied.append(row["data_step"])
        elif (to := row["records"][-1]["back_to"]) is not None:
            applied = [step for step in applied if step < to]
    return applied


def reference(folder: Path, data_steps: list[int]) -> str:
    """Return the state after training on exactly these steps, without a guard."""

    class Listed(Run):
        """Data steps from a list."""

        def sampler(self, *given: Any, **more: Any) -> Any:
            sampler, order = super().sampler(*given, **more), data_steps

            class Renamed:
                def indices(self, step: int) -> torch.Tensor:
                    return sampler.indices(order[step - 1])

                def loss_weight(self, step: int) -> float:
                    return sampler.loss_weight(step)

            return Renamed()

    (folder / "reference").mkdir()
    guarded_training.train(
        Listed(RankContext(), TrainingSession()),
        str(folder / "reference"),
        range(1, len(data_steps) + 1),
        rollback_copies=0,
        spike_threshold=None,
    )
    return end(sorted(read_step_logs(folder / "reference"), key=lambda row: row["step"]))


@pytest.mark.slow
@pytest.mark.promise("guard-rollback")
@pytest.mark.parametrize(
    ("back", "every", "step"), [(1, 10, 1), (2, 1, 2), (1, 1, 10), (3, 20, 15), (1, 10, 20), (2, 1, 1)]
)
def test_bad_update_under_a_good_loss_is_rolled_back(tmp_path: Path, back: int, every: int, step: int) -> None:
    """A NaN gradient shows in the next loss only. Copies made in between are as bad, and the first steps of a
    generation have no copy but its first state."""
    once = BadData([step], NAN, times=1)
    rows = alone(tmp_path / "bad", gradients=once, policy="replay", rollback_copies=back, copy_every=every)
    assert [row["data_step"] for row in rows if not row["allowed"]] == [step + 1]
    assert applied_steps(rows) == list(ALL)
    assert end(rows) == end(alone(tmp_path / "clean"))


@pytest.mark.parametrize("step", [1, 10, 15])
def test_batch_with_a_bad_gradient_is_skipped_at_second_time(tmp_path: Path, step: int) -> None:
    rows = alone(tmp_path / "bad", gradients=BadData([step], NAN), policy="skip", rollback_copies=1, copy_every=10)
    assert [row["data_step"] for row in rows if not row["allowed"]] == [step + 1, step + 2]
    applied = applied_steps(rows)
    assert applied == [data_step for data_step in ALL if not step <= data_step <= step + 2]
    assert end(rows) == reference(tmp_path, applied)


def test_excluded_state_is_not_rolled_back() -> None:
    run = Run(RankContext(), TrainingSession())
    guard = run.guard(rollback_copies=1, copy_every=1)
    model = torch.nn.Linear(4, 1)
    model.register_buffer("odd", torch.eye(3).to_sparse())
    model.register_buffer("cache", torch.zeros(3))
    run.track(exclude=["model.odd", "model.cache"], model=model)
    begun = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
        model.get_buffer("cache").add_(1)
    assert not guard.allows(torch.tensor(NAN))
    assert torch.equal(model.weight, begun)
    assert torch.equal(model.get_buffer("cache"), torch.ones(3))


@pytest.mark.promise("guard-rollback")
@pytest.mark.parametrize(("back", "every"), [(1, 1), (2, 5), (0, 1)])
def test_transiently_bad_batch_is_computed_again(tmp_path: Path, back: int, every: int) -> None:
    bad = BadData([23], NAN, times=1)
    rows = alone(tmp_path / "bad", bad=bad, policy="replay", rollback_copies=back, copy_every=every)
    assert sum(not row["allowed"] for row in rows) == 1
    assert applied_steps(rows) == list(ALL)
    if back:  # without a version the running statistics of the refused pass stay
        assert end(rows) == end(alone(tmp_path / "clean"))


def test_persistent_bad_loss_ends_the_run_with_advice(tmp_path: Path) -> None:
    with pytest.raises(LossDiverged, match=r"data step 23 is nan .*after 3 refusals.*learning rate"):
        alone(tmp_path / "bad", bad=BadData([23], NAN), policy="replay", rollback_copies=2, copy_every=5)


def test_guard_state_is_stored_and_restored() -> None:
    run = Run(RankContext(), TrainingSession())
    guard = run.guard(rollback_copies=0)
    for loss in (1.0, 1.1, math.inf, 0.9):
        guard.allows(torch.tensor(loss))
    other = Run(RankContext(), TrainingSession()).guard(rollback_copies=0)
    other.load_state_dict(decode_blob(encode_blob(guard.state_dict())))
    assert (other.data_step, other.records) == (5, guard.records)
    assert other.state_dict() == guard.state_dict()


def test_contradictory_guard_settings_are_refused() -> None:
    for options in (
        {"policy": "ignore"},
        {"rollback_copies": -1},
        {"copy_every": 0},
        {"spike_threshold": 0.0},
        {"warmup": 65},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            Run(RankContext(), TrainingSession()).guard(**options)
    run = Run(RankContext(), TrainingSession())
    run.guard()
    with pytest.raises(ValueError, match="has a guard already"):
        run.guard()
    with pytest.raises(ValueError, match="under the name guard"):
        run.track(guard=torch.nn.Linear(1, 1))


losses = st.lists(st.floats(0.01, 100.0), min_size=16, max_size=64)


@given(losses, st.floats(0.0, 1e6))
def test_spike_is_ten_spreads_above_the_median(past: list[float], loss: float) -> None:
    middle = statistics.median(past)
    spread = max(1.4826 * statistics.median([abs(p - middle) for p in past]), 0.01 * middle)
    assert bool(GuardOptions().describe_problem(loss, past)) == (loss > middle + 10 * spread)


def test_refused_loss_is_an_event_without_blame() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    finding = Finding(
        kind=FindingKind.RANK_LOSS,
        subject="job/g1/step23",
        severity=Severity.INFO,
        message="job job: the loss of data step 23 is nan",
        mode=Mode.OBSERVE,
    )
    effects = fleet.raise_finding("n2", finding)
    assert ["the loss of data step 23 is nan (n2)" in line for line in logged_sentences(effects, "finding")] == [True]
    assert all(decision == "no_action" for _, decision in decisions(effects))
    assert fleet.node_state("n2") is NodeState.HEALTHY


@pytest.mark.promise("guard-rollback")
@pytest.mark.slow
def test_ranks_roll_back_together_despite_a_killed_rank(forks: ForkPool, tmp_path: Path) -> None:
    """The kill is in the fifth step after the refusal. The guard's knowledge is restored with all other state."""
    train = partial(guarded_training.train_on, folder=str(tmp_path), faults=(Fault(1, 28, "reduced"),))
    with vaults(forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure(vault)
        with node_ranks(forks, train, vault.run_dir) as scene:
            spec = JobSpec(job=JOB, replicas=1, nproc_per_node=2)
            scene.start(0, 1)
            scene.form_generation(1, 0, 1, spec=spec)
            scene.ranks.pop(1).wait()
            scene.start(1)
            scene.form_generation(2, 0, 1, spec=spec, restore=RestoreRule())
            scene.wait_for_messages(RankFinished, 2, where=lambda m: m.generation == 2)
            (raised,) = scene.wait_for_messages(FindingRaised, 1)
            assert scene.finish() == [0, 0]
    assert (raised.finding.kind, raised.finding.evidence) == (FindingKind.RANK_LOSS, {"data_step": "23"})
    assert "the loss of data step 23 is nan" in raised.finding.message
    rows = read_step_logs(tmp_path)
    assert {row["generation"] for row in rows if row["rank"] == 1} == {1, 2}
    for rank in (0, 1):
        standing = {row["step"]: row for row in sorted(rows, key=lambda r: r["generation"]) if row["rank"] == rank}
        ordered = [standing[step] for step in sorted(standing)]
        assert [row["data_step"] for row in ordered if not row["allowed"]] == [23]
        assert [record["back_to"] for record in ordered[-1]["records"]] == [17]
        assert applied_steps(ordered) == [step for step in ALL if step != 23]
    assert len({row["parameters"] for row in rows if row["data_step"] == max(ALL)}) == 1
