"""Forked workers run every test once, and a worker that dies fails its test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

ROOT = Path(__file__).parents[3]
FIRST = """
import os, pathlib, pytest

@pytest.fixture(scope="session", autouse=True)
def ended():
    yield
    pathlib.Path(__file__).with_name(f"ended-{os.getpid()}").touch()

def test_good(tmp_path):
    assert tmp_path.is_dir()

def test_dies():
    os._exit(3)

def test_bad():
    print("said by the bad one")
    assert 0

@pytest.mark.skip(reason="why")
def test_left_out():
    pass
"""
SECOND = """
import pytest

@pytest.fixture
def torn():
    yield
    raise ValueError("at its end")

def test_torn(torn):
    pass
"""


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "--workers", "2", "-ra", *options]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout


def test_each_test_has_its_outcome(tmp_path: Path) -> None:
    status, said = run(tmp_path, first=FIRST, second=SECOND)
    assert status == 1
    assert "2 failed, 2 passed, 1 skipped, 1 error" in said
    assert "the worker ended with status 3 in this test" in said
    assert said.count("\nsaid by the bad one\n") == 1
    assert "ValueError: at its end" in said
    assert ": why" in said
    assert len(list(tmp_path.glob("ended-*"))) == 1, "the session's fixture of the one that did not die"


def test_exit_without_error_fails_its_test(tmp_path: Path) -> None:
    leaves = "import os\n\ndef test_leaves():\n    os._exit(0)\n\ndef test_after():\n    pass\n"
    status, said = run(tmp_path, first=leaves)
    assert status == 1
    assert "1 failed, 1 passed" in said
    assert "the worker ended with status 0 in this test" in said


def test_session_ends_at_the_first_failure(tmp_path: Path) -> None:
    status, said = run(tmp_path, "-x", first=FIRST)
    assert status == 1
    assert "1 failed, 1 passed" in said


def test_interrupt_in_a_worker_ends_the_session(tmp_path: Path) -> None:
    status, said = run(tmp_path, first="def test_it():\n    raise KeyboardInterrupt\n")
    assert status == 2
    assert "KeyboardInterrupt" in said
