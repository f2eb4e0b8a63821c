"""A process that follows its parent's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.parent_process import PARENT_VARIABLE, die_with_parent
from tests.support.processes import is_running
from tests.support.waiting import until

DEADLINE_S = 60.0

FOLLOWER = """
import os, signal, sys, time
from everstep.parent_process import PARENT_VARIABLE, die_with_parent
path, parent, signum = sys.argv[1], int(sys.argv[2]), signal.Signals(int(sys.argv[3]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
die_with_parent(parent or os.getppid(), signum)
with open(path + ".draft", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".draft", path)
time.sleep(60)
"""

STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_process_ends_with_its_parent(tmp_path: Path, signum: signal.Signals) -> None:
    ready = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", STARTER, FOLLOWER, str(ready), "0", str(int(signum))])
    try:
        until(ready.exists, "the follower")
        pid = int(ready.read_text())
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not is_running(pid), "the follower's end")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)])
def test_process_with_dead_parent_is_signalled_at_once(tmp_path: Path, signum: signal.Signals, status: int) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    follower = [sys.executable, "-c", FOLLOWER, str(tmp_path / "pid"), str(gone.pid), str(int(signum))]
    assert subprocess.run(follower, timeout=DEADLINE_S, check=False).returncode == status
    assert not (tmp_path / "pid").exists()


def test_invalid_signal_raises_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot follow the parent's end: Invalid argument"):
        die_with_parent(os.getppid(), 4096)  # type: ignore[arg-type]


def test_orphaned_process_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    program = "from everstep.parent_process import *; import signal; die_with_parent(parent_pid()); signal.pause()"
    orphan = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, PARENT_VARIABLE: str(gone.pid)})
    try:
        assert orphan.wait(60) == -signal.SIGTERM
    finally:
        orphan.kill()
