"""Figures from records: shares with their intervals, by audit and preset."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sdc.cells import MAIN
from bench.sdc.injection import Duration
from bench.sdc.report import Report
from bench.sdc.store import Store


def record(caught_by: str = "", **more: object) -> dict[str, object]:
    return {
        "rank": 1,
        "corruption": "one bit",
        "shape": "single",
        "probability": 0.01,
        "gate": 0.0,
        "elements": 1000,
        "activations": 10,
        "changed_step": 3,
        "steps": 20,
        "caught_by": caught_by,
        "latency": 17 if caught_by else None,
        "outcome": "convicted" if caught_by else "",
        "named": 1 if caught_by else None,
        "honest_convicted": [],
        "honest_strikes": [],
        **more,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    cell = f"{MAIN}/standard/attention"
    store.add(cell, 0, record("peer_replay"))
    store.add(cell, 1, record("peer_replay", named=2, honest_convicted=["peer_replay"]))
    store.add(cell, 2, record())
    store.add(cell, 3, record(changed_step=0))  # changed nothing, so there was nothing to catch
    store.add(cell, 5, record("matmul", probability=0.0001))
    store.add(cell, 6, record(probability=0.0))
    store.add(cell, 4, {"failed": "RuntimeError: connection reset", "rank": 2, "changed_step": 0})
    store.add(f"{MAIN}/clean/standard", 0, {"steps": 2000, "alarms": 1, "audits": []})
    store.add(f"{MAIN}/overhead-standard/all", 0, {"off_s": [1.0, 1.0, 2.0], "on_s": [1.01, 1.02, 2.06]})
    return store


def test_rows_sum_up_the_records(store: Store) -> None:
    values = {row.name: row.value for row in Report(store).rows()}
    assert values["standard: permanent faults caught"] == pytest.approx(200 / 3)
    assert values["standard: intermittent faults caught"] == 100
    assert values["standard: transient faults caught"] == 0
    assert values["standard: permanent, caught within 50 steps"] == pytest.approx(200 / 3)
    assert values["standard: of the caught, the rank named"] == pytest.approx(200 / 3)
    assert values["standard: honest ranks convicted"] == 1
    assert values["standard: runs ended by an error"] == 1
    assert values[f"{MAIN}/clean/standard: false alarms"] == 500
    assert values[f"{MAIN}/overhead-standard/all"] == pytest.approx(2)


def test_model_rows_show_each_duration_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = "vit-ddp-float32/light/attention"
    store.add(cell, 0, record("peer_replay"))
    store.add(cell, 1, record())
    store.add(cell, 2, record(probability=0.0001))
    store.add(cell, 3, record(probability=0.0))
    report = Report(store)
    rows = {row.name: row for row in report.model_rows(["vit"], ["light"], [Duration.PERMANENT, Duration.INTERMITTENT])}
    assert rows["vit, light: faults caught"].against.startswith("1 of 3")
    permanent = rows["light, all models: permanent faults caught"]
    assert (permanent.value, permanent.floor, permanent.aim, permanent.met) == (50, 95, 98, "no")
    intermittent = rows["light, all models: intermittent faults caught"]
    assert (intermittent.value, intermittent.floor, intermittent.aim) == (0, None, None)
    assert rows["light, all models: all of these faults caught"].against.startswith("1 of 3")
    assert "light, all models: transient faults caught" not in rows
    transient = {row.name: row for row in report.model_rows(["vit"], ["light"], [Duration.TRANSIENT])}
    assert transient["vit, light: faults caught"].against.startswith("0 of 1")
