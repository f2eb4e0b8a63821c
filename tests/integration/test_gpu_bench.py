"""Each step of bench.gpu on the CPU, in sizes that take seconds: the code that runs on a GPU, really run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gpu

LIMIT_S = 200.0
QUICKEST = "digest"
"""The step that runs in every suite; the others take minutes together."""
STEPS = [step.name for step in gpu.STEPS if step.name != "marked_tests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICKEST else pytest.mark.nightly) for name in STEPS]
)
def test_a_step_measures_something_on_the_cpu(tmp_path: Path, name: str) -> None:
    steps = [gpu.Step(name, LIMIT_S)]
    whole, done = gpu.run_all(steps, "cpu", tmp_path / "logs", LIMIT_S)
    log = (tmp_path / "logs" / f"{name}.log").read_text()
    assert [each.outcome for each in done] == ["done"], log
    assert any(row.value is not None for row in whole.rows), log
    assert [row.name for row in whole.rows if row.value is None and not row.against.startswith("not run: ")] == []
