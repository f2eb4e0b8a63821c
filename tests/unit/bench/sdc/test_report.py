"""Figures from records: shares with their intervals, by audit and preset."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sdc.cells import MAIN
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
    store.add(cell, 4, {"failed": "RuntimeError: connection reset", "rank": 2, "changed_step": 0})
    store.add(f"{MAIN}/clean/standard", 0, {"steps": 2000, "alarms": 1, "audits": []})
    store.add(f"{MAIN}/overhead-standard/all", 0, {"off_s": [1.0, 1.0, 2.0], "on_s": [1.01, 1.02, 2.06]})
    return store


def test_rows_sum_up_the_records(store: Store) -> None:
    values = {row.name: row.value for row in Report(store).rows()}
    assert values["standard: permanent faults caught"] == pytest.approx(200 / 3)
    assert values["standard: permanent, caught within 50 steps"] == pytest.approx(200 / 3)
    assert values["standard: of the caught, the rank named"] == 50
    assert values["standard: honest ranks convicted"] == 1
    assert values["standard: runs ended by an error"] == 1
    assert values[f"{MAIN}/clean/standard: false alarms"] == 500
    assert values[f"{MAIN}/overhead-standard/all"] == pytest.approx(2)


def test_model_rows_count_the_kinds_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = "vit-ddp-float32/light/attention"
    store.add(cell, 0, record("peer_replay"))
    store.add(cell, 1, record())
    store.add(cell, 2, record(probability=0.0))
    rows = {row.name: row for row in Report(store).model_rows(["vit"], ["light"], ["permanent"])}
    assert rows["vit, light: faults caught"].value == 50
    assert rows["light, all models: faults caught"].against.startswith("1 of 2")
    assert rows["light, all models: faults caught"].met == "no"
    once = {row.name: row for row in Report(store).model_rows(["vit"], ["light"], ["once"])}
    assert once["vit, light: faults caught"].against.startswith("0 of 1")
