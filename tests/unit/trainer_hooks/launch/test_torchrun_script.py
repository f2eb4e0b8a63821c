"""A rank that runs a script for torchrun, in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.forked_programs import ForkedProgram
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow


def main() -> None:
    """Run the script of the command line as the only rank of a process group."""
    import torch.distributed as dist

    import everstep
    from everstep_trainer.launch.processes import ScriptCommand
    from everstep_trainer.launch.torchrun_script import run_script

    script, store, no_python = sys.argv[1:]
    os.environ["MASTER_PORT"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    command = ScriptCommand(
        script=script,
        module=False,
        no_python=no_python == "True",
        arguments=("--lr", "0.1"),
        address="127.0.0.1",
        grace_s=60.0,
        max_restarts=2,
    )
    everstep.main(lambda run: run_script(command, run))
    print("rank returned", flush=True)


class Rank:
    """A process with one rank that runs ``script``."""

    def __init__(self, forks: ForkPool, folder: Path, script: str, *, no_python: bool = False) -> None:
        (folder / "script.py").write_text(script)
        (folder / "script.py").chmod(0o700)
        self._output = folder / "output"
        argv = [str(folder / "script.py"), str(folder / "store"), str(no_python)]
        self.process = ForkedProgram(forks, __name__, argv, self._output)

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def end(self) -> tuple[int, str]:
        """Return status and output once the rank has ended."""
        status = self.process.wait()
        return status, self.output


def test_script_gets_its_arguments_and_a_rendezvous(forks: ForkPool, tmp_path: Path) -> None:
    status, output = Rank(
        forks,
        tmp_path,
        """
import os, sys
names = ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS")
print(sys.argv[1:], *(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0, __name__)
""",
    ).end()
    assert output.splitlines() == ["['--lr', '0.1'] 127.0.0.1 False 2 True __main__", "rank returned"]
    assert status == 0


def test_program_runs_in_place_of_a_script(forks: ForkPool, tmp_path: Path) -> None:
    # Python ignores SIGPIPE, and a program that inherited that would not end with its reader.
    script = '#!/bin/sh\necho "$1 $2 $MASTER_ADDR"\ngrep -c "SigIgn:.*1...$" /proc/$$/status\ntrue'
    status, output = Rank(forks, tmp_path, script, no_python=True).end()
    assert (status, output.splitlines()) == (0, ["--lr 0.1 127.0.0.1", "0", "rank returned"])


def test_rank_ends_by_the_signal_of_its_script(forks: ForkPool, tmp_path: Path) -> None:
    status, _ = Rank(forks, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").end()
    assert status == -signal.SIGKILL


def test_signals_reach_the_script(forks: ForkPool, tmp_path: Path) -> None:
    """The script saves and ends by itself, and the rank returns with it."""
    rank = Rank(
        forks,
        tmp_path,
        """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved") or 0))
print("ready", flush=True)
signal.pause()
""",
    )
    until(lambda: rank.output == "ready\n", "the script is ready")
    rank.process.terminate()
    status, output = rank.end()
    assert (status, output) == (0, "ready\nsaved\nrank returned\n")
