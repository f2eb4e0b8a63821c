"""Per-rank state is restored on the rank that stored it, and refused on any other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everstep.errors import NotRestorable
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.state.tracked_state import TrackedState


class Cursor:
    """The read position of a rank."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Kept(TrainingSession):
    """A session that records the tracked state."""

    def track(self, objects: Any, options: object) -> int:
        self.tracked = objects
        TrackedState(objects)
        return 0


def tracked(cursor: object, rank: int = 1, world: int = 2, **choices: Any) -> Any:
    keeper = Kept()
    Run(RankContext(rank=rank, world_size=world), keeper).track(cursor=cursor, **{"per_rank": ["cursor"]} | choices)
    return keeper.tracked["cursor"]


def test_per_rank_state_returns_to_the_rank_of_origin() -> None:
    after = Cursor()
    tracked(after).load_state_dict(tracked(Cursor(7)).state_dict())
    assert after.at == 7


@pytest.mark.parametrize(
    ("rank", "world", "reason"),
    [(0, 2, "cursor of rank 0 was lost with its process"), (1, 3, "cursor was stored on 2 ranks, and")],
)
def test_per_rank_state_refuses_other_ranks_with_advice(rank: int, world: int, reason: str) -> None:
    stored, after = tracked(Cursor(7)).state_dict(), Cursor()
    with pytest.raises(NotRestorable, match=f"{reason}.*leave cursor out of per_rank"):
        tracked(after, rank, world).load_state_dict(stored)
    assert after.at == 0


def test_state_without_an_owner_rank_is_refused() -> None:
    with pytest.raises(NotRestorable, match="the stored state of cursor does not name its rank"):
        tracked(Cursor()).load_state_dict({"at": 7})


@pytest.mark.parametrize(
    ("cursor", "names", "error", "sentence"),
    [
        (Cursor(), "cursor", TypeError, "takes a list"),
        (Cursor(), ["curser"], ValueError, "curser, which is not tracked"),
        (torch.nn.Linear(1, 1), ["cursor"], TypeError, "modules and optimizers"),
        (object(), ["cursor"], TypeError, "has no state_dict"),
    ],
)
def test_invalid_per_rank_name_is_refused(cursor: object, names: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        tracked(cursor, per_rank=names)
