"""A tracked StatefulDataLoader continues at its rank's position, or is refused with advice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from everstep.errors import NotRestorable
from everstep_trainer.parallel.replicas import RankContext, Replica
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from tests.support.processes.waiting import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader


class StoredState(TrainingSession):
    """A session that restores the tracked loader from stored bytes."""

    def __init__(self, blob: bytes | None = None) -> None:
        self.blob = blob
        self.tracked: Any = None

    def track(self, objects: Any, options: object) -> int:
        self.tracked = objects["loader"]
        if self.blob is not None:
            self.tracked.load_state_dict(decode_blob(self.blob))
        return 0

    def keep(self) -> bytes:
        return encode_blob(self.tracked.state_dict())


def new_loader(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(1)
        return StatefulDataLoader(list(range(30)), batch_size=4, shuffle=True, generator=generator, **options)


def tracked(session: StoredState, rank: int, world: int, replica: Replica | None = None) -> Any:
    """Return a loader that is tracked by this rank. ``replica``: the declared replica of the rank, if any."""
    loader = new_loader()
    run = Run(RankContext(rank=rank, world_size=world), session)
    run._replicas._replica = replica or run._replicas._replica
    run.track(loader=loader)
    return loader


def test_stateful_loader_resumes_at_the_same_world_size() -> None:
    session = StoredState()
    batches = iter(tracked(session, 1, 2))
    next(batches)
    next(batches)
    blob = session.keep()
    rest = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in tracked(StoredState(blob), 1, 2)] == rest


def test_ranks_of_one_replica_are_at_the_same_samples() -> None:
    session = StoredState()
    batches = iter(tracked(session, 3, 4, Replica(1, 2)))
    next(batches)
    blob = session.keep()
    rest = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in tracked(StoredState(blob), 2, 4, Replica(1, 2))] == rest
    with pytest.raises(NotRestorable, match="data-parallel rank 0 was lost"):
        tracked(StoredState(blob), 1, 4, Replica(0, 2))


@pytest.mark.parametrize(
    ("rank", "world", "reason"),
    [
        (1, 3, "stored on 2 data-parallel ranks, and there are 3 now"),
        (0, 2, "StatefulDataLoader of data-parallel rank 0 was lost"),
    ],
)
def test_other_world_size_or_rank_is_refused_with_advice(rank: int, world: int, reason: str) -> None:
    session = StoredState()
    next(iter(tracked(session, 1, 2)))
    with pytest.raises(NotRestorable, match=f"({reason}).*Use run.loader"):
        tracked(StoredState(session.keep()), rank, world)


@pytest.mark.parametrize(
    "options", [{"rollback_copies": 1}, {"rollback_copies": 0, "policy": "replay"}], ids=["back", "replay"]
)
def test_guard_recomputing_data_is_refused_with_advice(options: dict[str, Any]) -> None:
    run = Run(RankContext(), StoredState())
    run.guard(**options)
    with pytest.raises(ValueError, match=r"loader is a StatefulDataLoader.*take run.loader.*rollback_copies=0"):
        run.track(loader=new_loader())


@pytest.mark.promise("stateful-loader")
def test_loader_workers_end_with_the_generation() -> None:
    loader = new_loader(num_workers=2)
    run = Run(RankContext(), StoredState())
    run.track(loader=loader)
    next(iter(loader))
    workers = loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    run.close()
    until(lambda: not any(worker.is_alive() for worker in workers), "the end of the workers")
