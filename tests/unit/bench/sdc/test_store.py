"""Records of the bench: kept, found again, and extended after a process died during a write."""

from __future__ import annotations

from pathlib import Path

from bench.sdc.store import Store

CELL = "gpt-ddp-float32/standard/attention"


def test_records_are_found_again(tmp_path: Path) -> None:
    Store(tmp_path).add(CELL, 3, {"rank": 1})
    assert Store(tmp_path).records(CELL) == {3: {"rank": 1}}
    assert Store(tmp_path).cells() == [CELL]
