"""The bench from end to end: two injections and an undisturbed run on three real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.processes import RankFailed
from bench.sdc.cells import Cell, Measure, cells_of_model
from bench.sdc.injection import Duration, Site
from bench.sdc.models import Config
from bench.sdc.ranks import Ranks
from bench.sdc.report import Report
from bench.sdc.store import Store

CONFIG = Config("mlp")


@pytest.mark.slow
def test_bench_records_injections(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(
        f"{CONFIG.name}/intervals/standard", 0, {"gradient_norm": 2, "gradient_buffer": 2, "collective": 2, "matmul": 2}
    )
    cell = Cell(CONFIG, "standard", "gemm_forward")
    with Ranks(world=3, warm_steps=3) as ranks:
        measure = Measure(ranks, store, window=17)
        for number in range(2):
            measure.injection(cell, number)
        Measure(ranks, store, window=17).injection(cell, 2)  # as another call of the bench does
        measure.clean(CONFIG, "standard", 0, steps=10)
        absent = Site.ATTENTION
        places = [Site(cell.what) for cell in cells_of_model(CONFIG.model, "standard") if cell.what != absent]
        assert all(measure.elements(CONFIG, site) for site in places)
        durations = {measure.duration(cell, number) for number in range(40)}
        with pytest.raises(RankFailed, match="no value of mlp passes attention"):
            measure.elements(CONFIG, absent)
    records = Store(tmp_path).records(cell.name)
    assert set(records) == {0, 1, 2}
    assert durations == set(Duration)
    for record in records.values():
        assert record["activations"] > 0
        assert record["changed_step"] == 3  # the fault's first step, and no audit changed anything before it
        assert record["honest_convicted"] == []
    assert any(record["caught_by"] == "matmul" for record in records.values())
    assert Store(tmp_path).records(f"{CONFIG.name}/clean/standard")[0]["alarms"] == 0
    assert any(row.name == cell.name for row in Report(store).rows())
