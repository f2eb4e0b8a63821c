"""An audit is skipped where its copies would not fit into memory."""

from __future__ import annotations

import pytest
from everstep_trainer.sdc.replay.memory import MemoryLevels, describe_shortage, read_memory_levels
from everstep_trainer.sdc.replay.units import Unit
from torch import nn

from tests.support.audited_models import CPU

MODEL = Unit("model", nn.Linear(1 << 14, 1 << 14, bias=False, device="meta"))
GIB = 1 << 30


@pytest.mark.parametrize(("available", "ranks", "fits"), [(5, 1, True), (4, 1, False), (9, 2, False), (10, 2, True)])
def test_gradients_come_on_top_of_the_peak(available: int, ranks: int, fits: bool) -> None:
    words = describe_shortage(MODEL, MemoryLevels(available * GIB, 3 * GIB), ranks)
    needed = f"its audit needs {5 * ranks:.1f} GiB of memory, and {available:.1f} GiB are free"
    assert words == ("" if fits else needed)


def test_unknown_memory_is_no_reason() -> None:
    assert describe_shortage(MODEL, None, 1) == ""


def test_memory_of_this_machine_is_read() -> None:
    levels = read_memory_levels(CPU)
    assert levels is not None
    assert levels.available > 0
    assert levels.until_peak >= 0
