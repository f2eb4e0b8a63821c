"""The tests that are marked ``gpu``, in the files that have such."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_steps.bounded_program import ROOT
from bench.gpu_steps.sheet import Sheet, not_run
from bench.table import Row

MOST_NAMED = 4
TEST_S = 100


def step(sheet: Sheet, device: str) -> None:
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
        subprocess.run([*command, f"--junitxml={results}", *files], cwd=ROOT, check=False)
        sheet.add(*rows(results.read_text()))


def rows(report: str) -> list[Row]:
    """What a JUnit report says: how many of the tests that could run have passed, and why the others could not."""
    passed, failed, skipped = sorted_cases(report)
    named = ", ".join(failed[:MOST_NAMED]) + (f" and {len(failed) - MOST_NAMED} more" if failed[MOST_NAMED:] else "")
    found = [not_run(name, why) for name, why in skipped]
    run = len(passed) + len(failed)
    if run:
        against = f"of {run}" + (f"; failed: {named}" if failed else "")
        found.insert(0, Row("tests marked gpu that pass", len(passed), "", run, run, against, smaller_is_better=False))
    return found


def sorted_cases(report: str) -> tuple[list[str], list[str], Sequence[tuple[str, str]]]:
    """Names of tests that passed and failed, and of those that were skipped with the reason."""
    passed, failed, skipped = [], [], []
    for case in ElementTree.fromstring(report).iter("testcase"):  # made by pytest a moment ago
        name = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (reason := case.find("skipped")) is not None:
            skipped.append((name, reason.get("message", "")))
        else:
            passed.append(name)
    return passed, failed, skipped
