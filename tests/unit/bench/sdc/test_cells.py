"""Cells and the injections that are planned for them."""

from __future__ import annotations

from bench.sdc.cells import Cell, cells_of_model, plan
from bench.sdc.injection import Duration


def test_plan_takes_cells_in_turn() -> None:
    first, second, *_ = cells_of_model("vit", "light")

    def duration(cell: Cell, number: int) -> Duration:
        return Duration.INTERMITTENT if (cell, number) == (first, 0) else Duration.PERMANENT

    planned = plan([first, second], [Duration.PERMANENT], 4, duration)
    assert planned == [(second, 0), (first, 1), (second, 1), (first, 2)]
