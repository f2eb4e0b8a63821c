#!/usr/bin/env python3
"""Run a test command, and run its failed tests once more if they are few.

``python tools/rerun_failed.py make test`` runs ``make test``. If at most three tests fail, each runs once more, alone.
A test that passes then is printed as FLAKY in the last lines, and does not fail the command. More than three failures,
an error in collection, an interrupt or a crash of pytest fail the command at once.

The command must end in pytest, directly or through other programs. It loads this file as a plugin, which reports to it
the tests that failed and pytest's own exit status: make has other ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest

MOST_RERUNS = 3
REPORT = "EVERSTEP_RERUN_REPORT"
TESTS_FAILED = 1  # pytest.ExitCode.TESTS_FAILED: all tests ran, and some failed


class Ended(NamedTuple):
    """How a test command ended."""

    status: int
    """Exit status of the command."""
    pytest_status: int | None
    """Exit status of pytest; None where no pytest reported to its end."""
    failed: list[str]
    """Node ids of the tests that failed, in order."""


def main(command: list[str]) -> int:
    """Run the command, then its failed tests once more, and return the exit status of it all.

    Args:
        command: The program and its arguments.
    """
    first = run(command)
    if first.status == 0:
        return 0
    if first.pytest_status != TESTS_FAILED or not 0 < len(first.failed) <= MOST_RERUNS:
        print(f"{len(first.failed)} tests failed; nothing is run again (exit status {first.status})", flush=True)
        return first.status
    print(f"{len(first.failed)} tests failed; each of them runs once more, alone", flush=True)
    passed = {test: run([sys.executable, "-m", "pytest", "-q", test]).status == 0 for test in first.failed}
    for test, ok in passed.items():
        print(f"FLAKY {test} (failed, then passed alone)" if ok else f"FAILED {test} (twice)", flush=True)
    return 0 if all(passed.values()) else first.status


def run(command: list[str]) -> Ended:
    """Run a command with this file as a pytest plugin."""
    here = str(Path(__file__).resolve().parent)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {
            **os.environ,
            REPORT: str(report),
            "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} -p {Path(__file__).stem}".strip(),
            "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        status = subprocess.run(command, env=environment, check=False).returncode
        if not report.exists():
            return Ended(status, None, [])
        reported = json.loads(report.read_text(encoding="utf-8"))
        return Ended(status, reported["status"], reported["failed"])


class Reporter:
    """Write the failed tests and pytest's exit status to a file when the session ends."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        text = json.dumps({"status": int(exitstatus), "failed": list(self._failed)})
        Path(self._path).write_text(text, encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Report from the session that the command began, and not from its workers, or from a pytest that a test runs."""
    path = os.environ.pop(REPORT, None)
    if path is not None:
        os.environ.pop("PYTEST_ADDOPTS", None)
        config.pluginmanager.register(Reporter(path), "everstep-rerun-reporter")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
