"""Records of the bench: kept, found again, and added to after a process that died while it wrote."""

from __future__ import annotations

from pathlib import Path

from bench.sdc.store import Store

CELL = "gpt-ddp-float32/standard/attention"


def test_records_are_found_again(tmp_path: Path) -> None:
    Store(tmp_path).add(CELL, 3, {"rank": 1})
    assert Store(tmp_path).records(CELL) == {3: {"rank": 1}}
    assert Store(tmp_path).cells() == [CELL]


def test_line_cut_off_is_made_again(tmp_path: Path) -> None:
    Store(tmp_path).add(CELL, 0, {"rank": 1})
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"number": 1, "ra')
    store = Store(tmp_path)
    assert set(store.records(CELL)) == {0}
    store.add(CELL, 1, {"rank": 2})
    assert set(Store(tmp_path).records(CELL)) == {0, 1}
