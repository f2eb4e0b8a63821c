"""The load bench on a small fleet: real sessions, and what it counts adds up. Times are the bench's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load.trials import JUDGEMENTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("nodes", "failing"), [(60, 20), pytest.param(300, 100, marks=pytest.mark.nightly)])
def test_load_bench_loses_nothing_on_a_small_fleet(tmp_path: Path, nodes: int, failing: int) -> None:
    written = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.fleet_load", "--nodes", str(nodes), "--seconds", "1", "--rounds", "2"]
    command += ["--forming-seconds", "1"]
    command += ["--storm", "--storm-seconds", "1", "--fail", str(failing), "--json", str(written)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert written.exists(), run.stdout + run.stderr
    rows = {row["name"]: row["value"] for row in json.loads(written.read_text())["rows"]}
    assert "refused" not in run.stderr
    assert 0 < rows["ingest latency, median"] <= rows["ingest latency, 99th percentile"]
    assert rows[f"rank lost, to the push at all {nodes} nodes of its job, median of 2"] > 0
    assert [value for name, value in rows.items() if ": lost of " in name] == [0, 0]
    assert rows[f"{failing} of {nodes} nodes failing at once: decided, all"] is not None
    verdicts = {kind: rows[f"{failing} of {nodes} nodes failing at once: first verdict {kind}"] for kind in JUDGEMENTS}
    assert sum(verdicts.values()) == failing
    assert min(verdicts.values()) > 0, "some leave within the budget, some are held, some are too many"
    assert rows["resident memory"] > 0
