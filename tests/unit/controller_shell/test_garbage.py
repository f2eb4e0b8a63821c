"""What lasts is not looked at by the garbage collector again and again, and rings that died are found all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from controller.serving import _Lasting


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_has_lasted_is_out_of_sight_and_dead_rings_go_when_it_has_doubled() -> None:
    lasting = _Lasting()
    lasting.settle()
    lasting.settle()
    ring = Ring()
    died = weakref.ref(ring)
    lasting.settle()
    del ring
    gc.collect()
    assert died() is not None, "it was looked at"
    more = [[] for _ in range(gc.get_freeze_count() + 1000)]  # type: ignore[var-annotated]
    lasting.settle()
    assert died() is None
    assert gc.get_freeze_count() > len(more)
