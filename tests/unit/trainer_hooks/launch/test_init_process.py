"""Process 1 of a process namespace that the test makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

CONTAINER = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
CONTAINER += ["--pid", "--fork", "--mount-proc", "--kill-child"]


def _cannot() -> bool:
    if shutil.which("unshare") is None:
        return True
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode != 0


pytestmark = pytest.mark.skipif(_cannot(), reason="this machine makes no namespaces for this user")

BEGIN = """
import os, pathlib, signal, subprocess, sys
from everstep_trainer.launch.init_process import continue_in_child_of_init
continue_in_child_of_init()
"""


def run_as_first_process(program: str) -> subprocess.CompletedProcess[str]:
    command = [*CONTAINER, sys.executable, "-c", BEGIN + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_program_runs_below_process_one_with_its_status() -> None:
    ended = run_as_first_process("print(os.getppid()); sys.exit(7)")
    assert (ended.stdout, ended.returncode) == ("1\n", 7)


def test_orphans_are_reaped() -> None:
    """The shell ends before its background process, which must not remain as a zombie."""
    ended = run_as_first_process("""
orphan = int(subprocess.run(["sh", "-c", "sleep 0.05 >&- 2>&- & echo $!"], capture_output=True, check=True).stdout)
while pathlib.Path(f"/proc/{orphan}").exists():
    signal.sigtimedwait((), 0.01)
print("reaped")
""")
    assert ended.stdout == "reaped\n", ended.stderr


def test_signals_to_process_one_reach_the_program() -> None:
    ended = run_as_first_process("""
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(1, signal.SIGTERM)
print(signal.sigwait({signal.SIGTERM}).name)
""")
    assert ended.stdout == "SIGTERM\n", ended.stderr
