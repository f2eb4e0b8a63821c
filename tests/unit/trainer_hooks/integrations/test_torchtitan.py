"""Parts of the integration with torchtitan that need no processes: its data and its refusals."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks("torchtitan"),
    pytest.mark.filterwarnings("ignore"),  # torchtitan is imported by the first test
]


class Count(IterableDataset[Any]):
    """The numbers from 0, with a position."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.size:
            self.position += 1
            yield {"input": torch.tensor(self.position - 1)}, torch.tensor(self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def counting(size: int) -> Any:
    """Return the config of a torchtitan loader over ``Count``."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            size: int = 0

        def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int) -> None:
            super().__init__(Count(config.size), dp_rank, dp_world_size, batch_size=1)

    return Loader.Config(size=size)


def shared(size: int, rank: int, ranks: int, microbatches: int) -> Any:
    from everstep_trainer.integrations.torchtitan import SharedStream

    config = SharedStream.Config(inner=counting(size), microbatches=microbatches)
    return config.build(dp_rank=rank, dp_world_size=ranks)


def numbers(batches: Iterator[Any], count: int) -> list[int]:
    return [int(next(batches)[0]["input"]) for _ in range(count)]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 3), (4, 3)])
def test_shared_stream_gives_each_step_the_same_samples(ranks: int, microbatches: int) -> None:
    batch, steps = 24, 3
    streams = [shared(100, rank, ranks, microbatches) for rank in range(ranks)]
    readers = [iter(stream) for stream in streams]
    for step in range(steps):
        read = [numbers(reader, batch // ranks) for reader in readers]
        assert sorted(n for part in read for n in part) == [*range(step * batch, (step + 1) * batch)]
        assert all(n // microbatches % ranks == rank for rank, part in enumerate(read) for n in part)
        states = [pickle.loads(stream.state_dict()["dp_rank_0"]) for stream in streams]
        assert all(state == states[0] for state in states)


def test_stream_continues_on_other_number_of_ranks() -> None:
    from everstep_trainer.integrations.torchtitan import _loader_state
    from everstep_trainer.state.python_value_codec import decode_blob, encode_blob

    first = shared(100, 1, 2, 1)
    numbers(iter(first), 4)
    stored = decode_blob(encode_blob(_loader_state(first, 1, 2).state_dict()))
    second = shared(100, 2, 4, 1)
    _loader_state(second, 2, 4).load_state_dict(stored)
    assert numbers(iter(second), 2) == [10, 14]


def test_own_part_is_stored_for_its_rank_without_pickle() -> None:
    from everstep_trainer.integrations.torchtitan import _loader_state
    from everstep_trainer.state.stateful_loader import PerRankLoader

    def holds_bytes(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(holds_bytes, value.values()))
        return isinstance(value, bytes)

    loader = counting(100).build(dp_rank=1, dp_world_size=2)
    numbers(iter(loader), 3)
    tracked = _loader_state(loader, 1, 2)
    assert isinstance(tracked, PerRankLoader)
    stored = tracked.state_dict()
    assert not holds_bytes(stored)
    again = counting(100).build(dp_rank=1, dp_world_size=2)
    _loader_state(again, 1, 2).load_state_dict(stored)
    assert numbers(iter(again), 1) == [3]
    assert holds_bytes(loader.state_dict()), "torchtitan pickles it"


def test_config_that_cannot_be_kept_is_refused() -> None:
    from everstep_trainer.integrations.torchtitan import _check

    def config(mode: str, batch: int) -> Any:
        return SimpleNamespace(
            checkpoint=SimpleNamespace(async_mode=mode), training=SimpleNamespace(global_batch_size=batch)
        )

    _check(config("async", 8), shared_stream=True)
    _check(config("disabled", -1), shared_stream=False)
    with pytest.raises(ValueError, match="async_with_pinned_mem"):
        _check(config("async_with_pinned_mem", 8), shared_stream=False)
    with pytest.raises(ValueError, match=r"training\.global_batch_size"):
        _check(config("disabled", -1), shared_stream=True)
