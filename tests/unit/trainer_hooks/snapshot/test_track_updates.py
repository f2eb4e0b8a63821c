"""Updates of tracked state while it is copied: who waits for the copy, and what becomes of one that was overtaken."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from everstep_trainer.runtime.interrupt import Regroup
from everstep_trainer.snapshot import snapshotter as module
from everstep_trainer.snapshot.copy import HostMover, WriteCounts
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import JobSpec, RestoreRule
from tests.support.forked import ForkPool
from tests.support.generations import JOB, generation
from tests.support.layouts import playing
from tests.support.lone_rank import LoneRank, lone_rank


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


class CopyingKeeper(TrainingSession):
    """Snapshots whose copier stands still until somebody has waited for it, or let it go on."""

    def __init__(self, rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = rank
        self.go_on = threading.Event()
        self.begun = threading.Event()
        copy = module.SnapshotSources.copy

        def late_copy(*arguments: object, **more: object) -> object:
            self.begun.set()
            assert self.go_on.wait(60), "nobody waits for the copy"
            return copy(*arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(module.SnapshotSources, "copy", late_copy)

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        spec = generation(1)
        state = TrackedState(objects)
        self.snapshots = Snapshotter(
            self._rank.client, state, spec, spec.roster[0], dist.HashStore(), lambda _: None, options=options
        )
        return 0

    def before_update(self) -> None:
        self.go_on.set()
        self.snapshots.wait()

    def on_step_finished(self, step: int) -> None:
        self.snapshots.begin(step)

    def is_copied(self) -> bool:
        assert self.snapshots._last is not None
        return self.snapshots._last.copied.is_set()

    def ended(self) -> None:
        assert self.snapshots._last is not None
        assert self.snapshots._last.done.wait(60)


def large() -> nn.Linear:
    """More than the training thread copies itself."""
    return nn.Linear(1024, 1024, bias=False)


def restored(rank: LoneRank, objects: Mapping[str, object]) -> Version | None:
    spec = generation(2, restore=RestoreRule())
    return Restoration(rank.client, spec, spec.roster[0], dist.HashStore()).fill(TrackedState(objects)).version


@pytest.mark.promise("no-torn-step")
def test_every_listed_optimizer_waits_for_the_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
    keeper = CopyingKeeper(rank, monkeypatch)
    run = Run(RankContext(), keeper)
    run.track(model=stages, optimizer=optimizers)
    run.step_finished()
    stood = stages[1]["stage1"].weight.detach().clone()
    for parameter in stages[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()
    keeper.go_on.set()
    keeper.snapshots.close(finish=True)
    again = [nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)}) for number in (0, 1)]
    assert restored(rank, {"model": again}) == Version(1, 1)
    assert torch.equal(again[1]["stage1"].weight, stood)


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
    model, keeper = large(), CopyingKeeper(rank, monkeypatch)
    run = Run(RankContext(), keeper)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()
    assert keeper.begun.wait(60)
    with torch.no_grad():
        model.weight.add_(1)  # as a momentum encoder in a forward pass
    keeper.go_on.set()
    keeper.ended()
    for _ in range(2):
        run.step_finished()
        assert keeper.is_copied()
        with torch.no_grad():
            model.weight.add_(1)
    keeper.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {2, 3}
    assert caplog.text.count("model.weight was modified without notice while the snapshot of step 1") == 1
    assert caplog.text.count("run.before_update()") == 1
    again = large()
    assert restored(rank, {"model": again}) == Version(1, 3)
    assert torch.equal(again.weight + 1, model.weight)


@pytest.mark.promise("overtaken-copy")
def test_update_overlapping_the_copy_end_drops_the_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts a write when it is done."""
    model, keeper = large(), CopyingKeeper(rank, monkeypatch)
    copied = SegmentView.mark_copied

    def copied_and_changed(view: SegmentView, slot: int) -> None:
        copied(view, slot)
        with torch.no_grad():
            model.weight.add_(1)

    monkeypatch.setattr(SegmentView, "mark_copied", copied_and_changed)
    keeper.go_on.set()
    run = Run(RankContext(), keeper)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()
    keeper.ended()
    keeper.snapshots.close(finish=True)
    assert rank.sealed() == set()
    assert not list(rank.view().complete_slots())


@pytest.mark.promise("overtaken-copy")
def test_training_without_optimizer_waits_for_each_copy(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    model, keeper = large(), CopyingKeeper(rank, monkeypatch)
    run = Run(RankContext(), keeper)
    run.track(model=model)
    keeper.go_on.set()
    for _ in range(2):
        run.step_finished()
        assert keeper.is_copied()
        model.weight.data.add_(1)  # which torch does not count
    run.before_update()
    stood = model.weight.detach().clone()
    keeper.go_on.clear()
    run.step_finished()
    assert not keeper.is_copied()
    run.before_update()
    assert keeper.is_copied()
    model.weight.data.add_(1)
    keeper.snapshots.close(finish=True)
    again = large()
    assert restored(rank, {"model": again}) == Version(1, 3)
    assert torch.equal(again.weight, stood)


def swap(model: nn.Linear) -> torch.Tensor:
    """Put other weights into the model as averaging helpers do, which torch does not count; return the former ones."""
    raw = model.weight.detach().clone()
    model.weight.data.copy_(-raw)
    return raw


@pytest.mark.promise("overtaken-copy")
@pytest.mark.parametrize("put_back", ["before the copy ends", "after the copy", "never"])
def test_copy_of_swapped_weights_is_dropped(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, put_back: str
) -> None:
    model, keeper = large(), CopyingKeeper(rank, monkeypatch)
    keeper.go_on.set()
    run = Run(RankContext(), keeper)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    run.step_finished()  # the plan is made
    keeper.ended()
    run.before_update()
    keeper.go_on.clear()
    copy_and_hash = HostMover.run

    def copy_and_put_back(*arguments: Any, **more: Any) -> Any:
        result = copy_and_hash(*arguments, **more)
        model.weight.data.copy_(raw)
        return result

    if put_back == "before the copy ends":
        monkeypatch.setattr(HostMover, "run", copy_and_put_back)
    run.step_finished()
    raw = swap(model)
    keeper.go_on.set()
    keeper.ended()
    if put_back == "after the copy":
        model.weight.data.copy_(raw)
    run.before_update()
    monkeypatch.setattr(HostMover, "run", copy_and_hash)
    for _ in range(2):
        stood = model.weight.detach().clone()
        run.step_finished()
        assert keeper.is_copied()
        swap(model)
    keeper.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {1, 3, 4}
    assert caplog.text.count("model.weight was modified without notice while the snapshot of step 2") == 1
    assert caplog.text.count("under torch.no_grad() without .data") == 1
    again = large()
    assert restored(rank, {"model": again}) == Version(1, 4)
    assert torch.equal(again.weight, stood)


@pytest.mark.promise("overtaken-copy")
def test_swap_taken_back_after_the_copy_keeps_the_copy(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, keeper = large(), CopyingKeeper(rank, monkeypatch)
    keeper.go_on.set()
    run = Run(RankContext(), keeper)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
    for _ in range(3):
        run.step_finished()
        keeper.ended()
        model.weight.data.copy_(swap(model))
        run.before_update()
    keeper.snapshots.close(finish=True)
    assert {version.step for version in rank.sealed()} == {1, 2, 3}
    assert "modified" not in caplog.text


def of_two(rank: LoneRank) -> tuple[list[Snapshotter], list[nn.Linear]]:
    """Two ranks of one node with a copy of a model each; what they store of step 2 is stored by the second alone."""
    spec = generation(1, ranks=[("n1", 0), ("n1", 1)], spec=JobSpec(job=JOB, nproc_per_node=2))
    store, models = dist.HashStore(), [nn.Linear(8, 8) for _ in spec.roster]
    both = [
        Snapshotter(rank.client, TrackedState({"model": model}), spec, member, store, lambda _: None)
        for model, member in zip(models, spec.roster, strict=True)
    ]
    for call in (Snapshotter.wait, lambda snapshots: snapshots.begin(1), Snapshotter.wait):
        for snapshots in both:
            call(snapshots)
    both[1].begin(2)
    assert both[1]._last is not None
    assert both[1]._last.copied.wait(60)
    return both, models


@pytest.mark.promise("overtaken-copy")
@pytest.mark.parametrize("changed", ["", "counted", "uncounted"])
def test_changed_state_is_not_stored_for_a_dead_rank(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    covered: list[object] = []
    monkeypatch.setattr(module, "store_with_covers", lambda *_: covered.append(True))
    both, models = of_two(rank)
    if changed:
        with torch.no_grad():
            (models[1].weight if changed == "counted" else models[1].weight.data).add_(1)
    for snapshots in both:
        snapshots.close(finish=True)
    assert bool(covered) is not bool(changed)


def test_step_of_a_dead_rank_failing_to_store_is_logged(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OutOfSlotMemory("no slot is free")

    monkeypatch.setattr(module, "store_with_covers", fails)
    for snapshots in of_two(rank)[0]:
        snapshots.close(finish=True)
    assert "cannot cover step 2; training continues: no slot is free" in caplog.text


@pytest.mark.promise("overtaken-copy")
def test_optimizer_writes_to_shards_and_parameters_are_counted() -> None:
    model = nn.Linear(4, 4)
    with playing(0, (2,)) as mesh:
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
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, as it compiles
def test_compiled_step_of_a_tracked_optimizer_is_reused() -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-3), foreach=False)
    Run(RankContext(), TrainingSession()).track(model=model, optimizer=optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(6):
        model(torch.ones(1, 4)).sum().backward()
        with torch._dynamo.config.patch(error_on_recompile=number > 1):  # state is made in the first
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
        if step % every == 0 and step % 7:  # what a loss scaler leaves out now and then is no sum
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("over several steps are not stored") == warned


def test_gradients_of_an_interrupted_step_are_cleared() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    Run(RankContext(rank=0, world_size=1), TrainingSession()).track(model=model, optimizer=optimizer)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
