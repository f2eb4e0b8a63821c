"""A rank that runs a script for torchrun, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, torch.distributed as dist
import everstep
from everstep_trainer.launch.processes import ScriptCommand
from everstep_trainer.launch.torchrun_script import run_script

os.environ["MASTER_PORT"] = "0"
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
command = ScriptCommand(
    script=sys.argv[1], module=False, arguments=("--lr", "0.1"), address="127.0.0.1", grace_s=60.0, max_restarts=2
)
everstep.main(lambda run: run_script(command, run))
print("rank returned", flush=True)
"""

pytestmark = pytest.mark.slow


class Rank:
    """A process with one rank that runs ``script``."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "script.py").write_text(script)
        argv = [sys.executable, "-c", PROGRAM, str(folder / "script.py"), str(folder / "store")]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self) -> tuple[int, str]:
        """Return status and output once the rank has ended."""
        try:
            output, _ = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        return self.process.returncode, output


def test_script_gets_its_arguments_and_a_rendezvous(tmp_path: Path) -> None:
    status, output = Rank(
        tmp_path,
        """
import os, sys
names = ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS")
print(sys.argv[1:], *(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0, __name__)
""",
    ).end()
    assert output.splitlines() == ["['--lr', '0.1'] 127.0.0.1 False 2 True __main__", "rank returned"]
    assert status == 0


def test_rank_ends_by_the_signal_of_its_script(tmp_path: Path) -> None:
    status, _ = Rank(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").end()
    assert status == -signal.SIGKILL


def test_signals_reach_the_script(tmp_path: Path) -> None:
    """The script saves and ends by itself, and the rank returns with it."""
    rank = Rank(
        tmp_path,
        """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved") or 0))
print("ready", flush=True)
signal.pause()
""",
    )
    assert rank.process.stdout is not None
    assert rank.process.stdout.readline() == "ready\n"
    os.kill(rank.process.pid, signal.SIGTERM)
    status, output = rank.end()
    assert (status, output) == (0, "saved\nrank returned\n")
