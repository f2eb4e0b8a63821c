"""The demonstration itself: a real run through seven faults; and what is left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.world import PREFIX, descendants
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until
from tests.support.processes.warm_programs import WarmProgram

ROOT = Path(__file__).parents[3]
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


class Demo:
    """A demonstration that runs, and what of its own it would leave: others may run on the machine."""

    def __init__(self, out: Path, temporary: Path, *arguments: str, warm: bool = False) -> None:
        self._temporary = temporary
        self._worlds: set[str] = set()
        command = ["-m", "examples.demo", "--out", str(out), *arguments]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        self.process: subprocess.Popen[bytes] | WarmProgram
        if warm:
            self.process = WarmProgram(command, ROOT, environment, out / "demo.out", out / "demo.err")
            return
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, deadline_s: float) -> int:
        """Its exit status."""
        until(lambda: self.see() or self.process.poll() is not None, "its world", deadline_s)
        return self.process.wait(deadline_s)

    def see(self) -> bool:
        """Remembers the name of the world, where that is there already."""
        self._worlds |= {path.name for path in self._temporary.glob(f"{PREFIX}*")}
        return bool(self._worlds)

    def in_shared_memory(self) -> set[Path]:
        assert self.see(), "no world was seen"
        return {path for name in self._worlds if (path := Path("/dev/shm", name)).exists()}

    def kill(self) -> None:
        for pid in reversed(descendants(self.process.pid)):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def demo(tmp_path: Path, short_path: Path) -> Iterator[Demo]:
    """A demonstration in the middle of its training, before any fault."""
    demo = Demo(tmp_path, short_path, "--fast", "--steps", "100000", "--without-reference", warm=True)
    try:
        until(lambda: any((tmp_path / "steps").glob("n*.jsonl")), "a rank steps", 90)
        assert demo.in_shared_memory()
        yield demo
    finally:
        demo.kill()


@pytest.mark.nightly  # test_torture.py and test_commit_protocol.py are the smaller ones
@pytest.mark.timeout(1200)
def test_demo_recovers_from_every_fault_exactly(tmp_path: Path, short_path: Path) -> None:
    demo = Demo(tmp_path, short_path, "--fast")
    try:
        status = demo.wait(1180)
    finally:
        demo.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert status == 0, summary["problems"]
    assert {fault["kind"] for fault in summary["faults"]} == FAULTS
    assert summary["samples"]["repeated"] == summary["samples"]["skipped"] == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert not demo.in_shared_memory()


def test_ctrl_c_leaves_no_process_and_no_memory(demo: Demo) -> None:
    below = descendants(demo.process.pid)[1:]
    assert len(below) > 10
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(60) == 130
    assert not [pid for pid in below if is_running(pid)]
    assert not demo.in_shared_memory()
