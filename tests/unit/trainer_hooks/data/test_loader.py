"""The samples of a step depend on the step alone, not on workers, ranks, prefetching or earlier loads."""

from __future__ import annotations

import gc
import multiprocessing.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, random_split

from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.data.stream import StreamReader
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.processes.waiting import until
from tests.unit.trainer_hooks.data.loader_datasets import (
    SIZE,
    BatchFetching,
    Counted,
    Numbers,
    Seekable,
    Shuffling,
    SplitByWorker,
    Stuck,
    WorkerKilling,
    as_tuple,
    masked,
)

BATCH, STEPS, SEED = 7, 20, 3  # 140 samples: several epochs of 41, which straddle
KINDS = {
    "map-style": Numbers,
    "fetched together": BatchFetching,
    "stream": Counted,
    "stream that jumps": Seekable,
    "stream that workers split": SplitByWorker,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def run_of(rank: int = 0, world: int = 1) -> Run:
    return Run(RankContext(rank=rank, world_size=world), TrainingSession())


def loaded(dataset: Any, first: int = 1, last: int = STEPS, rank: int = 0, world: int = 1, **options: Any) -> list[Any]:
    """Return the batches that one rank loads, step by step."""
    run = run_of(rank, world)
    loader = run.loader(dataset, global_batch=BATCH, seed=SEED, **{"collate_fn": as_tuple} | options)
    try:
        return [loader.batch(step) for step in range(first, last + 1)]
    finally:
        run.close()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> type[Dataset[Any]]:
    return KINDS[request.param]


@pytest.mark.promise("loader-deterministic")
@pytest.mark.parametrize("workers", [1, 3])
def test_samples_and_random_draws_do_not_depend_on_workers(make: type[Dataset[Any]], workers: int) -> None:
    assert loaded(make(), num_workers=workers, prefetch_factor=2) == loaded(make())


@pytest.mark.promise("loader-deterministic")
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_collate_draws_do_not_depend_on_workers_or_first_step(make: type[Dataset[Any]], part: bool) -> None:
    def data() -> Any:
        return random_split(make(), [30, 11], torch.Generator().manual_seed(1))[0] if part else make()

    if part and issubclass(make, Counted):
        return
    whole = loaded(data(), collate_fn=masked)
    assert len({mask for _, mask in whole}) == STEPS, "each step has a mask of its own"
    assert not {mask for _, mask in whole} & {noise for samples, _ in whole for _, noise in samples}
    assert loaded(data(), collate_fn=masked, num_workers=2) == whole
    assert loaded(data(), first=13, collate_fn=masked) == whole[12:]
    ranks = [loaded(data(), rank=rank, world=2, collate_fn=masked) for rank in range(2)]
    assert [first[0] + second[0] for first, second in zip(*ranks, strict=True)] == [samples for samples, _ in whole]
    assert [batch[1] for batch in ranks[0]] == [mask for _, mask in whole], "the first rank's batch begins where it did"


def test_loader_fetches_whole_batches_with_fetch_together() -> None:
    class Asked(BatchFetching):
        asked: list[int] = []

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked.append(len(indices))
            return super().__getitems__(indices)

    batch = loaded(Asked(), last=1, fetch_together=True)
    assert Asked.asked == [BATCH]
    assert batch == loaded(Asked(), last=1, fetch_together=True, num_workers=1)
    with pytest.raises(TypeError, match="__getitems__"):
        loaded(Numbers(), fetch_together=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_no_random_number_of_the_training(make: type[Dataset[Any]], workers: int) -> None:
    def draws(load: bool) -> list[float]:
        run, numbers = run_of(), []
        loader = run.loader(make(), global_batch=BATCH, collate_fn=masked, num_workers=workers)
        for step in run.steps(until=3, seed=9):
            numbers.append(random.random())
            if load:
                loader.batch(step)
            numbers += [torch.rand(1).item(), random.random(), float(np.random.rand())]
        run.close()
        return numbers

    assert draws(load=True) == draws(load=False)


@pytest.mark.slow
def test_virtual_ranks_load_their_own_parts(make: type[Dataset[Any]]) -> None:
    run = run_of()
    loader = run.loader(make(), global_batch=BATCH, seed=SEED, collate_fn=as_tuple, num_workers=2)
    run.replicate(torch.nn.Linear(1, 1), virtual_ranks=3)
    for step in (1, 2):
        parts = list(run.parts(loader, step))
        assert [len(part.batch) for part in parts] == [2, 2, 3]
        assert sum((part.batch for part in parts), ()) == loaded(make())[step - 1]
    next(run.parts(loader, 3))
    assert sum((part.batch for part in run.parts(loader, 4)), ()) == loaded(make())[3], "though step 3 was left early"
    run.close()


def test_seekable_stream_reads_only_its_own_samples() -> None:
    jumping, plain = Seekable(), Counted()
    loaded(jumping, first=10, last=12, rank=1, world=2)
    loaded(plain, first=10, last=12, rank=1, world=2)
    assert jumping.read == 3 * 4
    assert plain.read == 12 * BATCH
    assert plain.epochs == [0, 1, 2]


@pytest.mark.promise("loader-deterministic")
@pytest.mark.parametrize("lazy", [True, False], ids=["as it is read", "at once"])
@pytest.mark.parametrize("generator", ["random", "torch", "numpy"])
def test_self_shuffling_stream_has_one_order_for_all_readers(generator: str, lazy: bool) -> None:
    def data() -> Shuffling:
        return Shuffling(generator, lazy=lazy)

    whole = loaded(data())
    order = [index for batch in whole for index, _ in batch]
    epochs = [order[start : start + SIZE] for start in range(0, len(order) - SIZE + 1, SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs), "each epoch has each sample once"
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) > 1, "in another order"
    ranks = [loaded(data(), rank=rank, world=3) for rank in range(3)]
    assert [sum(parts, ()) for parts in zip(*ranks, strict=True)] == whole
    assert loaded(data(), num_workers=2) == whole
    assert loaded(data(), first=13) == whole[12:]


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="an epoch has no samples"):
        StreamReader(Counted(0)).read(0)


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "generator", "in_order", "persistent_workers"])
def test_reserved_loader_options_are_refused_by_name(option: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError, match=f"run.loader has no {option}: "):
        run_of().loader(Numbers(), global_batch=BATCH, **options)


def test_a_stream_has_no_last_batch_to_drop() -> None:
    with pytest.raises(TypeError, match="not supported for iterable data"):
        run_of().loader(Counted(), global_batch=BATCH, drop_last=True)


def test_batch_too_small_for_the_ranks_is_refused_for_streams() -> None:
    with pytest.raises(ValueError, match="at least 9, or fewer ranks"):
        run_of(0, 9).loader(Counted(), global_batch=BATCH)


def test_dataset_error_is_raised_and_the_next_step_works() -> None:
    class Torn(Numbers):
        torn = True

        def __getitem__(self, index: int) -> tuple[int, float]:
            if self.torn:
                raise KeyError("mine")
            return super().__getitem__(index)

    dataset = Torn()
    loader = run_of().loader(dataset, global_batch=BATCH, seed=SEED, collate_fn=as_tuple)
    with pytest.raises(KeyError, match="mine"):
        loader.batch(1)
    dataset.torn = False
    assert loader.batch(2) == loaded(Numbers())[1]


def test_stuck_workers_end_with_their_generation() -> None:
    before = set(multiprocessing.active_children())
    run = run_of()
    loader = run.loader(Stuck(), global_batch=BATCH, num_workers=2)
    loader._iterator = loader._begin(1, [loader.for_rank(0, 1)])
    ours = set(multiprocessing.active_children()) - before
    assert len(ours) == 2
    run.close()
    until(lambda: not any(worker.is_alive() for worker in ours), "the end of both")


@pytest.fixture
def collect_sockets() -> Iterator[None]:
    """Collect garbage after tests of killed workers. torch raises a worker's death from a signal handler, possibly
    after ``multiprocessing`` has made a socket and before it can close it. Python warns when that socket is collected:
    here, where the warning is ignored, and not in a later test."""
    yield
    gc.collect()


# torch reports a killed worker by an exception from its signal handler, which may interrupt torch itself while it reads
# from the worker's socket, or while it opens temporary files to count the free descriptors: neither is closed then.
OF_KILLED_WORKERS = pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning", "ignore:unclosed file <_io.BufferedRandom:ResourceWarning"
)


def _workers_since(before: set[Any]) -> list[Any]:
    return [child for child in multiprocessing.active_children() if child not in before]


@pytest.mark.slow
@pytest.mark.promise("loader-worker-killed")
@OF_KILLED_WORKERS
@pytest.mark.usefixtures("collect_sockets")
@pytest.mark.parametrize(("make", "victim"), [("map-style", 0), ("stream that workers split", 1)], indirect=["make"])
def test_worker_killed_between_steps_costs_no_sample(make: type[Dataset[Any]], victim: int) -> None:
    before, run = set(multiprocessing.active_children()), run_of()
    loader = run.loader(make(), global_batch=BATCH, seed=SEED, collate_fn=as_tuple, num_workers=2)
    first = [loader.batch(step) for step in (1, 2)]
    worker = _workers_since(before)[victim]
    worker.kill()
    until(lambda: not worker.is_alive(), "its end")
    rest = [loader.batch(step) for step in range(3, STEPS + 1)]
    run.close()
    assert first + rest == loaded(make())


@pytest.mark.slow
@pytest.mark.promise("loader-worker-killed")
@OF_KILLED_WORKERS
@pytest.mark.usefixtures("collect_sockets")
def test_worker_killed_during_a_step_costs_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1").touch()
    run = run_of()
    indices = ElasticSampler(SIZE, global_batch=BATCH, seed=SEED).indices(2)
    dataset = WorkerKilling(int(indices[-1]), tmp_path)
    loader = run.loader(dataset, global_batch=BATCH, seed=SEED, collate_fn=as_tuple, num_workers=2)
    run.replicate(torch.nn.Linear(1, 1), virtual_ranks=3)
    steps = [sum((part.batch for part in run.parts(loader, step)), ()) for step in range(1, 5)]
    run.close()
    assert steps == loaded(Numbers(), last=4)
    assert "was killed by SIGKILL" in caplog.text


@pytest.mark.slow
@pytest.mark.promise("loader-worker-killed")
@OF_KILLED_WORKERS
@pytest.mark.usefixtures("collect_sockets")
def test_sample_killing_every_worker_is_an_error_with_signal(tmp_path: Path) -> None:
    for life in range(9):
        (tmp_path / str(life)).touch()
    dataset = WorkerKilling(int(ElasticSampler(SIZE, global_batch=BATCH, seed=SEED).indices(3)[0]), tmp_path)
    loader = run_of().loader(dataset, global_batch=BATCH, seed=SEED, num_workers=1)
    with pytest.raises(RuntimeError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL, the 4th in a row while step "):
        _ = [loader.batch(step) for step in (1, 2, 3)]


def test_a_timeout_ends_the_wait_for_a_worker() -> None:
    before, run = set(multiprocessing.active_children()), run_of()
    loader = run.loader(Stuck(), global_batch=BATCH, num_workers=1, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"no batch came from the workers within timeout=0.2 seconds"):
        loader.batch(1)
    workers = _workers_since(before)
    run.close()
    until(lambda: not any(worker.is_alive() for worker in workers), "their end")
