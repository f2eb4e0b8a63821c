"""Updates of tracked state during a snapshot: the optimizer waits for the copy, or the overtaken copy is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor, Shard

from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.base.interrupt import Regroup
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.slots.copy import HostMover, SnapshotSources, WriteCounts
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.layouts import fake_group
from tests.support.ranks.lone_rank import LoneRank, lone_rank


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


class PausedCopySession(TrainingSession):
    """A session whose snapshot copies pause until ``before_update`` waits for them, or the test sets ``may_copy``."""

    def __init__(self, rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self.may_copy = threading.Event()
        self.begun = threading.Event()
        copy = SnapshotSources.copy

        def paused_copy(*arguments: object, **more: object) -> object:
            self.begun.set()
            assert self.may_copy.wait(60), "the copy was not released"
            return copy(*arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(SnapshotSources, "copy", paused_copy)

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        spec = generation(1)
        state = TrackedState(objects)
        self.snapshots = Snapshotter(
            self._rank.client, state, spec, spec.roster[0], HashStore(), lambda _: None, options=options
        )
        return 0

    def before_update(self) -> None:
        self.may_copy.set()
        self.snapshots.wait()

    def on_step_finished(self, step: int) -> None:
        self.snapshots.begin(step)

    def is_copied(self) -> bool:
        assert self.snapshots._last is not None
        return self.snapshots._last.copied.is_set()

    def wait_until_ended(self) -> None:
        assert self.snapshots._last is not None
        assert self.snapshots._last.done.wait(60)


def large_model() -> nn.Linear:
    """A model that is too large for the training thread to copy it itself."""
    return nn.Linear(1024, 1024, bias=False)


def restore(rank: LoneRank, objects: Mapping[str, object]) -> Version | None:
    spec = generation(2, restore=RestoreRule())
    return Restoration(rank.client, spec, spec.roster[0], HashStore()).fill(TrackedState(objects)).version


@pytest.mark.promise("no-torn-step")
def test_every_listed_optimizer_waits_for_the_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
    session = PausedCopySession(rank, monkeypatch)
    run = Run(RankContext(), session)
    run.track(model=stages, optimizer=optimizers)
    run.step_finished()
    before = stages[1].get_parameter("stage1.weight").detach().clone()
    for parameter in stages[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()
    session.may_copy.set()
    session.snapshots.close(finish=True)
    again = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    assert restore(rank, {"model": again}) == Version(1, 1)
    assert torch.equal(again[1].get_parameter("stage1.weight"), before)


def test_optimizer_of_an_ended_run_asks_only_the_new_run() -> None:
    class Over(TrainingSession):
        def before_update(self) -> None:
            raise Regroup

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    first = Run(RankContext(), Over())
    first.track(model=model, optimizer=[optimizer])
    with pytest.raises(Regroup):
        optimizer.step()
    first.close()
    Run(RankContext(), TrainingSession()).track(model=model, optimizer=[optimizer])
    optimizer.step()


@pytest.mark.promise("overtaken-copy")
def test_copy_overtaken_by_an_update_is_dropped(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, session = large_model(), PausedCopySession(rank, monkeypatch)
    run = Run(RankContext(), session)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()
    assert session.begun.wait(60)
    with torch.no_grad():
        model.weight.add_(1)  # as a momentum encoder does in its forward pass
    session.may_copy.set()
    session.wait_until_ended()
    for _ in range(2):
        run.step_finished()
        assert session.is_copied()
        with torch.no_grad():
            model.weight.add_(1)
    session.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {2, 3}
    assert caplog.text.count("model.weight was modified without notice while the snapshot of step 1") == 1
    assert caplog.text.count("run.before_update()") == 1
    again = large_model()
    assert restore(rank, {"model": again}) == Version(1, 3)
    assert torch.equal(again.weight + 1, model.weight)


@pytest.mark.promise("overtaken-copy")
def test_update_overlapping_the_copy_end_drops_the_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts a write at its end, which may lie behind the end of the copy."""
    model, session = large_model(), PausedCopySession(rank, monkeypatch)
    copied = SegmentView.mark_copied

    def copied_and_changed(view: SegmentView, slot: int) -> None:
        copied(view, slot)
        with torch.no_grad():
            model.weight.add_(1)

    monkeypatch.setattr(SegmentView, "mark_copied", copied_and_changed)
    session.may_copy.set()
    run = Run(RankContext(), session)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()
    session.wait_until_ended()
    session.snapshots.close(finish=True)
    assert rank.sealed() == set()
    assert not list(rank.view().complete_slots())


@pytest.mark.promise("overtaken-copy")
def test_training_without_optimizer_waits_for_each_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session = large_model(), PausedCopySession(rank, monkeypatch)
    run = Run(RankContext(), session)
    run.track(model=model)
    session.may_copy.set()
    for _ in range(2):
        run.step_finished()
        assert session.is_copied()
        model.weight.data.add_(1)  # torch does not count a write through .data
    run.before_update()
    stood = model.weight.detach().clone()
    session.may_copy.clear()
    run.step_finished()
    assert not session.is_copied()
    run.before_update()
    assert session.is_copied()
    model.weight.data.add_(1)
    session.snapshots.close(finish=True)
    again = large_model()
    assert restore(rank, {"model": again}) == Version(1, 3)
    assert torch.equal(again.weight, stood)


def swap(model: nn.Linear) -> torch.Tensor:
    """Exchange the weights as averaging helpers do, uncounted by torch; return the former weights."""
    raw = model.weight.detach().clone()
    model.weight.data.copy_(-raw)
    return raw


@pytest.mark.promise("overtaken-copy")
@pytest.mark.parametrize("put_back", ["before the copy ends", "after the copy", "never"])
def test_copy_of_swapped_weights_is_dropped(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, put_back: str
) -> None:
    model, session = large_model(), PausedCopySession(rank, monkeypatch)
    session.may_copy.set()
    run = Run(RankContext(), session)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()  # this call makes the snapshot plan
    session.wait_until_ended()
    run.before_update()
    session.may_copy.clear()
    copy_and_hash = HostMover.run

    def copy_and_put_back(*arguments: Any, **more: Any) -> Any:
        result = copy_and_hash(*arguments, **more)
        model.weight.data.copy_(raw)
        return result

    if put_back == "before the copy ends":
        monkeypatch.setattr(HostMover, "run", copy_and_put_back)
    run.step_finished()
    raw = swap(model)
    session.may_copy.set()
    session.wait_until_ended()
    if put_back == "after the copy":
        model.weight.data.copy_(raw)
    run.before_update()
    monkeypatch.setattr(HostMover, "run", copy_and_hash)
    for _ in range(2):
        stood = model.weight.detach().clone()
        run.step_finished()
        assert session.is_copied()
        swap(model)
    session.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {1, 3, 4}
    assert caplog.text.count("model.weight was modified without notice while the snapshot of step 2") == 1
    assert caplog.text.count("under torch.no_grad() without .data") == 1
    again = large_model()
    assert restore(rank, {"model": again}) == Version(1, 4)
    assert torch.equal(again.weight, stood)


@pytest.mark.promise("overtaken-copy")
def test_swap_reverted_after_the_copy_keeps_the_copy(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, session = large_model(), PausedCopySession(rank, monkeypatch)
    session.may_copy.set()
    run = Run(RankContext(), session)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    for _ in range(3):
        run.step_finished()
        session.wait_until_ended()
        model.weight.data.copy_(swap(model))
        run.before_update()
    session.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {1, 2, 3}
    assert "modified" not in caplog.text


@pytest.mark.promise("overtaken-copy")
def test_optimizer_writes_to_shards_and_parameters_are_counted() -> None:
    model = nn.Linear(4, 4)
    with fake_group(0, (2,)) as mesh:
        model.bias = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
        state = TrackedState({"model": model})
        writes = WriteCounts(state.tensors())
        counts = writes.counts()
        assert writes.written_since(counts) == []
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            torch.optim.AdamW([parameter], foreach=parameter is model.weight).step()
        assert writes.written_since(counts) == ["model.bias", "model.weight"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch warns while it compiles
def test_compiled_step_of_a_tracked_optimizer_is_reused() -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-3), foreach=False)
    Run(RankContext(), TrainingSession()).track(model=model, optimizer=optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(6):
        model(torch.ones(1, 4)).sum().backward()
        with torch._dynamo.config.patch(error_on_recompile=number > 1):  # the first step creates the optimizer's state
            step()


@pytest.mark.parametrize(("every", "warned"), [(1, False), (2, True), (4, True)])
def test_gradient_accumulation_over_steps_is_warned_once(
    every: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(RankContext(rank=0, world_size=1), TrainingSession())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=80):
        model(torch.ones(1, 2)).sum().backward()
        if step % every == 0 and step % 7:  # a step that a loss scaler skips now and then is no accumulation
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("over several steps are not stored") == warned
