"""The epochs of a DataLoader: order, shares of ranks, and the place after a restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

from everstep_trainer.data.epochs import EpochLoader, EpochSampler, order_of
from everstep_trainer.data.stream import BatchRequests
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.ranks.recorded_session import RecordedSession

SIZE, BATCH = 22, 3
DATA = TensorDataset(torch.arange(SIZE))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **({"batch_size": BATCH} | options))


def samples_by_rank(given: DataLoader[Any], ranks: int, epoch: int, *, meant_for: int = 2) -> list[list[int]]:
    """Return each rank's samples of the epoch, from batches that were made for two ranks."""
    order = order_of(given, None, meant_for, 7)
    first = epoch * order.batches + 1
    samplers = [EpochSampler(order, rank=rank, world_size=ranks) for rank in range(ranks)]
    return [[i for step in range(first, first + order.batches) for i in s.indices(step).tolist()] for s in samplers]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in-order": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(SIZE), torch.Generator())),
    "distributed": lambda: loader(sampler=DistributedSampler(DATA, num_replicas=2, rank=1)),
    "batches": lambda: DataLoader(DATA, batch_sampler=Buckets(SubsetRandomSampler(range(SIZE)), BATCH, False)),
}


class Buckets(BatchSampler):
    """A batch sampler of the script's own."""


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_epoch_has_each_sample_once(kind: str, ranks: int) -> None:
    given = LOADERS[kind]()
    seen = [sorted(chain.from_iterable(samples_by_rank(given, ranks, epoch))) for epoch in range(3)]
    assert seen == [[*range(SIZE)]] * 3


def test_short_batch_weights_add_up_to_mean() -> None:
    order = order_of(loader(), None, 2, 0)
    last = order.batches
    assert len(EpochSampler(order).global_indices(last)) == SIZE % (2 * BATCH) == 4
    for ranks in (2, 3, 4):
        samplers = [EpochSampler(order, rank=rank, world_size=ranks) for rank in range(ranks)]
        losses = [s.indices(last).double().mean() * s.loss_weight(last) for s in samplers]
        assert sum(losses) / ranks == pytest.approx(sum(range(18, 22)) / 4)


def test_drop_last_ends_epoch_at_whole_batch() -> None:
    assert order_of(loader(drop_last=True), None, 2, 0).batches == 3
    with pytest.raises(ValueError, match="do not make a batch"):
        order_of(loader(drop_last=True), 23, 2, 0)


def test_batch_sampler_refuses_global_batch() -> None:
    with pytest.raises(ValueError, match="determines the batches"):
        order_of(LOADERS["batches"](), 6, 2, 0)


class Balanced(DistributedSampler[int]):
    """A sampler that splits samples over ranks in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(reversed([*super().__iter__()]))


class SplitBatches(BatchSampler):
    """A batch sampler that splits batches over ranks."""

    num_replicas = 2


def test_sampler_that_splits_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Balanced splits its samples over 2 ranks.*num_replicas=1"):
        order_of(loader(sampler=Balanced(DATA, num_replicas=2, rank=1)), None, 2, 0)
    batches = SplitBatches(SubsetRandomSampler(range(SIZE)), BATCH, False)
    with pytest.raises(ValueError, match="SplitBatches splits its samples over 2 ranks"):
        order_of(DataLoader(DATA, batch_sampler=batches), None, 2, 0)
    whole = order_of(loader(sampler=Balanced(DATA, num_replicas=1, rank=0, shuffle=False)), None, 2, 0)
    assert [*whole.samples(0, 0)] == [*range(SIZE)][::-1][: 2 * BATCH], "the order of its own is kept"


def test_sampler_with_other_length_is_refused() -> None:
    class Short(SubsetRandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([*super().__iter__()][:-1])

    with pytest.raises(ValueError, match="yields 21 items"):
        order_of(loader(sampler=Short(range(SIZE))), None, 1, 0).samples(0, 0)


def test_elastic_job_needs_global_batch() -> None:
    run = Run(RankContext(is_elastic=True), RecordedSession())
    with pytest.raises(ValueError, match="give global_batch"):
        run.epoch_loader(loader())
    assert len(run.epoch_loader(loader(), global_batch=11)) == 2


class Counting(IterableDataset[tuple[int, float]]):
    """Numbers with a random part, in sequence."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return ((number, float(torch.rand(()))) for number in range(SIZE))

    def __len__(self) -> int:
        return SIZE


def train(session: RecordedSession, given: DataLoader[Any], *, accumulates: int = 1, epochs: int = 3) -> list[Any]:
    """Iterate as a script does; return the batches with their epochs and random numbers, and where epochs ended."""
    run = Run(RankContext(), session)
    batches = run.epoch_loader(given, seed=7, accumulates=accumulates)
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    seen: list[Any] = []
    for epoch in batches.epochs(epochs):
        seen += [(epoch, [part.tolist() for part in batch], float(torch.rand(()))) for batch in batches]
        seen.append(("end of", epoch))
    run.close()
    return seen


@pytest.mark.parametrize("accumulates", [1, 3])
@pytest.mark.parametrize(
    "given", [loader(shuffle=True), DataLoader(Counting(), batch_size=BATCH)], ids=["indexed", "iterable"]
)
def test_epochs_continue_at_next_batch(given: DataLoader[Any], accumulates: int) -> None:
    session = RecordedSession()
    whole = train(session, given, accumulates=accumulates)
    ends = [place for place, seen in enumerate(whole) if seen[0] == "end of"]
    batches = ends[0]
    updates = -(-batches // accumulates)
    assert sorted(session.versions) == [*range(1, 3 * updates + 1)]
    for step in session.versions:
        epoch, done = divmod(step, updates)
        rest = whole[epoch * (batches + 1) + done * accumulates :]
        assert train(RecordedSession(session.versions, step), given, accumulates=accumulates) == rest


def test_epochs_end_with_last_step() -> None:
    def taken(restored: int) -> list[tuple[int, int]]:
        run = Run(RankContext(), session if not restored else RecordedSession(session.versions, restored))
        batches = run.epoch_loader(loader(), accumulates=2)
        run.track(model=torch.nn.Linear(1, 1))
        return [(epoch, sum(1 for _ in batches)) for epoch in batches.epochs(max_steps=6)]

    session = RecordedSession()
    assert taken(0) == [(0, 8), (1, 4)]
    assert [taken(step) for step in (3, 4, 5, 6)] == [[(0, 2), (1, 4)], [(1, 4)], [(1, 2)], []]


def test_plain_loop_over_epochs_skips_finished_ones() -> None:
    def passes(restored: int) -> list[int]:
        run = Run(RankContext(), session if not restored else RecordedSession(session.versions, restored))
        batches = run.epoch_loader(loader())
        run.track(model=torch.nn.Linear(1, 1))
        return [sum(1 for _ in batches) for _ in range(2)]

    session = RecordedSession()
    assert passes(0) == [8, 8]
    assert passes(11) == [0, 5]


def test_epoch_left_early_is_refused() -> None:
    run = Run(RankContext(), RecordedSession())
    batches: EpochLoader = run.epoch_loader(loader())
    epochs = batches.epochs(2)
    next(epochs)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="epoch 0 was left"):
        next(epochs)


class Scaled(Dataset[float]):
    """Data that the script changes between two epochs, and whose workers are set up by ``open_source``."""

    def __init__(self) -> None:
        self.scale, self.source = 1.0, 0.0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.scale + self.source


def open_source(worker_id: int) -> None:
    info: Any = get_worker_info()
    assert info is not None
    info.dataset.source = 100.0  # as torch's documentation opens files in workers


@pytest.mark.parametrize(("is_persistent", "second"), [(False, 102.0), (True, 101.0)])
def test_workers_see_changes_between_epochs(is_persistent: bool, second: float) -> None:
    data = Scaled()
    run = Run(RankContext(), RecordedSession())
    own = DataLoader(data, 4, num_workers=1, worker_init_fn=open_source, persistent_workers=is_persistent)
    loader, seen = run.epoch_loader(own), list[float]()
    for _ in loader.epochs(2):
        seen += [batch.mean().item() for batch in loader]
        data.scale = 2.0
    run.close()
    assert seen == [101.0, second]


def test_nothing_is_loaded_beyond_an_epoch() -> None:
    order = order_of(loader(), None, 1, 0)
    requests = BatchRequests([EpochSampler(order)], first_step=2, last_step=order.batches)
    assert [request.step for request in requests] == [*range(2, order.batches + 1)]
