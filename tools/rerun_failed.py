#!/usr/bin/env python3
"""Run a test command, and run its failed tests once more if they are few.

``python tools/rerun_failed.py make test`` runs ``make test``. If at most three tests fail, each runs once more, alone.
A test that passes then is printed as FLAKY in the last lines, and does not fail the command. More than three failures,
an error in collection, an interrupt or a crash of pytest fail the command at once.

If no test ends for fifteen minutes, the command is killed, since a worker hangs. The tests that did not end are
printed, and run once more in one process.

The command must end in pytest, directly or through other programs. It loads this file as a plugin, which reports to it
the tests that failed and pytest's own exit status: make has other ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

MOST_RERUNS = 3
REPORT = "EVERSTEP_RERUN_REPORT"
STALL = "EVERSTEP_RERUN_STALL_S"
STALL_S = 900.0
"""Seconds without the end of a test after which the command is killed. The longest tests take two minutes."""
TESTS_FAILED = 1  # pytest.ExitCode.TESTS_FAILED: all tests ran, and some failed


class Ended(NamedTuple):
    """How a test command ended."""

    status: int
    """Exit status of the command."""
    pytest_status: int | None
    """Exit status of pytest; None where no pytest reported to its end."""
    failed: list[str]
    """Node ids of the tests that failed, in order."""
    unfinished: list[str]
    """Node ids of the tests that had not ended when the command stalled, in order; empty where it did not stall."""


def main(command: list[str]) -> int:
    """Run the command, then its failed tests once more, and return the exit status of it all.

    Args:
        command: The program and its arguments.
    """
    first = run(command)
    if first.status == 0:
        return 0
    for test in first.unfinished:
        print(f"UNFINISHED {test}", flush=True)
    if first.pytest_status != TESTS_FAILED or not (first.unfinished or first.failed) or len(first.failed) > MOST_RERUNS:
        print(f"{len(first.failed)} tests failed; nothing is run again (exit status {first.status})", flush=True)
        return first.status
    print(f"{len(first.failed)} tests failed; each of them runs once more, alone", flush=True)
    again = [sys.executable, "-m", "pytest", "-q"]
    passed = {test: run([*again, test]).status == 0 for test in first.failed}
    finished = not first.unfinished or run([*again, *first.unfinished]).status == 0
    for test, ok in passed.items():
        print(f"FLAKY {test} (failed, then passed alone)" if ok else f"FAILED {test} (twice)", flush=True)
    if first.unfinished:
        print(f"FLAKY worker: {len(first.unfinished)} tests did not end" if finished else "FAILED unfinished tests")
    return 0 if all(passed.values()) and finished else first.status


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
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            status = process.wait()
            with suppress(ProcessLookupError):  # workers that hang outlive their session
                os.killpg(process.pid, signal.SIGKILL)
        if not report.exists():
            return Ended(status, None, [], [])
        reported = json.loads(report.read_text(encoding="utf-8"))
        return Ended(status, reported["status"], reported["failed"], reported["unfinished"])


class Reporter:
    """Write the failed tests and pytest's exit status to a file when the session ends or stalls."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed: dict[str, None] = {}
        self._unfinished: dict[str, None] = {}
        self._stall_s = float(os.environ.get(STALL, STALL_S))
        self._watchdog: threading.Timer | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._unfinished |= dict.fromkeys(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._unfinished |= dict.fromkeys(ids)
        self._expect_a_test()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._unfinished.pop(nodeid, None)
        self._expect_a_test()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._stop_watchdog()
        self._write(int(exitstatus), [])

    def _expect_a_test(self) -> None:
        self._stop_watchdog()
        self._watchdog = threading.Timer(self._stall_s, self._end_stalled_session)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _end_stalled_session(self) -> None:
        self._write(TESTS_FAILED, list(self._unfinished))
        os._exit(TESTS_FAILED)  # the main thread waits for a worker that hangs

    def _write(self, status: int, unfinished: list[str]) -> None:
        text = json.dumps({"status": status, "failed": list(self._failed), "unfinished": unfinished})
        Path(self._path).write_text(text, encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Report from the session that the command began, and not from its workers, or from a pytest that a test runs."""
    path = os.environ.pop(REPORT, None)
    if path is not None:
        os.environ.pop("PYTEST_ADDOPTS", None)
        config.pluginmanager.register(Reporter(path), "everstep-rerun-reporter")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
