"""The training thread waits for values of other ranks in their generation's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from torch.distributed import DistStoreError

from everstep.clock import ManualClock
from everstep_trainer.slots.layout_exchange import wait_for_values


class LateStore:
    """A store in which all keys appear after ``looks`` looks. It has no ``wait``: torch's prints warnings."""

    def __init__(self, looks: int) -> None:
        self._looks_left = looks

    def check(self, keys: Sequence[str]) -> bool:
        self._looks_left -= 1
        return self._looks_left < 0

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [key.encode() for key in keys]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> tuple[ManualClock, list[float]]:
    """A clock that goes on by each pause, and the pauses."""
    clock, taken = ManualClock(), list[float]()

    def sleep(seconds: float) -> None:
        taken.append(seconds)
        clock.advance(seconds)

    monkeypatch.setattr("everstep_trainer.slots.layout_exchange.time.sleep", sleep)
    return clock, taken


def test_late_values_are_looked_for_again_and_again(pauses: tuple[ManualClock, list[float]]) -> None:
    clock, taken = pauses
    store = cast(Any, LateStore(looks=60))

    assert wait_for_values(store, ["a", "b"], clock, timeout_s=600.0) == [b"a", b"b"]

    assert len(taken) == 60
    assert max(taken) <= 0.25
    # A wait ends at most a quarter of its length late, and never by more than a quarter of a second.
    assert all(taken[index] <= max(0.0005, 0.26 * sum(taken[:index]) + 0.0005) for index in range(len(taken)))


def test_missing_values_raise_in_the_end(pauses: tuple[ManualClock, list[float]]) -> None:
    clock, _ = pauses
    with pytest.raises(DistStoreError, match="have published a and the like in 5 s"):
        wait_for_values(cast(Any, LateStore(looks=10_000)), ["a"], clock, timeout_s=5.0)
