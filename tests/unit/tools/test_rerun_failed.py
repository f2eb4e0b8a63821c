"""Failed tests run once more when they are few, and are called flaky when they pass then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

TOOL = Path(__file__).parents[3] / "tools" / "rerun_failed.py"
FAKE_SUITE = """
import pathlib
import pytest

RUNS = pathlib.Path(__file__).with_name("runs")

def fails(name, times):
    with RUNS.open("a") as runs:
        runs.write(name + "\\n")
    assert RUNS.read_text().split().count(name) > times

def test_good():
    fails("good", 0)
"""


def run(folder: Path, *tests: str, options: tuple[str, ...] = ()) -> tuple[int, list[str], list[str]]:
    """Exit status, lines printed by the tool itself, and names of the tests in the order in which they ran."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_fake.py").write_text(FAKE_SUITE + "\n".join(tests))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(TOOL.parents[1])
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the suite's plugins take a second of imports
    command = [sys.executable, str(TOOL), sys.executable, "-m", "pytest", *options]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout.splitlines(), (folder / "runs").read_text().split()


def failing(name: str, times: int) -> str:
    return f"def test_{name}():\n    fails('{name}', {times})\n"


def test_flaky_test_is_named_in_the_last_lines(tmp_path: Path) -> None:
    """With workers; other tests run without."""
    options = ("-p", "xdist.plugin", "--numprocesses", "2", "--dist", "loadfile")
    status, lines, ran = run(tmp_path, failing("once", 1), failing("again", 1), options=options)
    assert status == 0
    assert sorted(lines[-2:]) == [
        "FLAKY test_fake.py::test_again (failed, then passed alone)",
        "FLAKY test_fake.py::test_once (failed, then passed alone)",
    ]
    assert sorted(ran) == ["again", "again", "good", "once", "once"]  # what passed does not run again


def test_test_that_fails_twice_fails_the_command(tmp_path: Path) -> None:
    status, lines, ran = run(tmp_path, failing("once", 1), failing("ever", 9))
    assert status == 1
    assert lines[-2:] == [
        "FLAKY test_fake.py::test_once (failed, then passed alone)",
        "FAILED test_fake.py::test_ever (twice)",
    ]
    assert ran.count("ever") == 2


def test_four_failures_are_not_run_again(tmp_path: Path) -> None:
    status, lines, ran = run(tmp_path, *(failing(f"once{number}", 1) for number in range(4)))
    assert (status, len(ran)) == (1, 5)
    assert lines[-1] == "4 tests failed; nothing is run again (exit status 1)"


def test_passing_suite_prints_nothing_more(tmp_path: Path) -> None:
    status, lines, ran = run(tmp_path)
    assert (status, ran, "1 passed" in lines[-1]) == (0, ["good"], True)


def test_tests_of_a_stopped_worker_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_RERUN_STALL_S", "4")
    stop = "def test_stop():\n    import os\n    RUNS.exists() or (RUNS.touch(), os.kill(os.getpid(), 19))\n"
    (tmp_path / "test_stop.py").write_text(FAKE_SUITE.partition("def test_good")[0] + stop)
    options = ("-p", "xdist.plugin", "--numprocesses", "1", "--dist", "loadfile", "test_stop.py", "test_fake.py")
    status, lines, ran = run(tmp_path, options=options)
    assert (status, ran) == (0, ["good"])
    assert lines[-1] == "FLAKY worker: 2 tests did not end"
