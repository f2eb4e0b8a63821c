"""The demonstration itself: a real run through seven faults; and what is left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo.world import descendants

ROOT = Path(__file__).parents[2]
FAULTS = {
    "rank_killed",
    "rank_hangs",
    "node_killed",
    "xid_79",
    "slot_corrupt",
    "parameter_corrupt",
    "controller_killed",
}

pytestmark = pytest.mark.slow


def start(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "examples.demo", "--out", str(out), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    end = time.perf_counter() + deadline_s
    while not condition():
        assert time.perf_counter() < end, f"never happened: {what}"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("everstep-demo-*")}


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A demonstration in the middle of its training, before any fault."""
    process = start(tmp_path, "--fast", "--steps", "100000", "--without-reference")
    try:
        eventually(lambda: any((tmp_path / "steps").glob("n*.jsonl")), "a rank steps", 90)
        yield process
    finally:
        for pid in reversed(descendants(process.pid)):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(280)
def test_every_fault_is_recovered_and_the_run_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    before = left_in_shared_memory()
    process = start(tmp_path, "--fast", "--steps", "450")
    try:
        status = process.wait(270)
    finally:
        below = descendants(process.pid)
        for pid in reversed(below):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert status == 0, summary["problems"]
    assert {fault["kind"] for fault in summary["faults"]} == FAULTS
    assert summary["samples"]["repeated"] == summary["samples"]["skipped"] == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert left_in_shared_memory() == before


def test_ctrl_c_leaves_no_process_and_no_memory(demo: subprocess.Popen[bytes]) -> None:
    below = descendants(demo.pid)[1:]
    assert len(below) > 10
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    assert not [pid for pid in below if running(pid)]
    assert not left_in_shared_memory()


def test_a_killed_demo_takes_everything_along(demo: subprocess.Popen[bytes]) -> None:
    below = descendants(demo.pid)[1:]
    demo.kill()
    demo.wait()
    eventually(lambda: not [pid for pid in below if running(pid)], "the end of all it had started")
    eventually(lambda: not left_in_shared_memory(), "the release of its shared memory")
