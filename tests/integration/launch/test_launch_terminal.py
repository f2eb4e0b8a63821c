"""The terminal output of a run: few lines at the start, none inside a progress bar, none after the receipt."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.host.processes import read_processes
from everstep.layout.kept_output import kept_outputs, last_lines
from tests.support.processes.launcher import DEADLINE_S, LAUNCH, ROOT, SLOW_RANKS, launched

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, time, torch
import everstep

class Bar:  # writes what tqdm writes
    def update(self, step):
        print(f"\\r{step}it [00:01, 10it/s]", end="", file=sys.stderr, flush=True)

try:
    from tqdm import tqdm as Bar
except ImportError:
    pass

def train(run):
    model = torch.nn.Linear(8, 8)
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    bar = Bar()
    bar.update(1)
    for step in run.steps(until=int(sys.argv[1])):
        replicas(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        bar.update(1)
        if step == 5 and run.rank == 0:
            print("first line of the script")
            print("terminal:", os.isatty(1), os.isatty(2))
        time.sleep(0.02)

if __name__ == "__main__":
    everstep.main(train)
"""
STYLE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[78D])")


@pytest.fixture
def folder(short_path: Path) -> Path:
    (short_path / "train.py").write_text(TRAIN)
    return short_path


class Terminal:
    """A launcher in the foreground of a pseudo terminal; ``text`` is all that it and its ranks wrote."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 120))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "PET_"))}
        environ = {**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder), "TERM": "xterm"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, *LAUNCH, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environ,
        )
        os.close(slave)
        self.text = ""

    def read_until(self, pattern: str) -> None:
        deadline = time.perf_counter() + DEADLINE_S
        while not re.search(pattern, self.text):
            assert time.perf_counter() < deadline, self.text
            assert self._read(), self.text

    def press_ctrl_c(self) -> None:
        os.write(self.master, b"\x03")

    def wait(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        if not select.select([self.master], [], [], DEADLINE_S)[0]:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # the last process has closed it
            return False
        self.text += data.decode(errors="replace")
        return True

    @property
    def lines(self) -> list[str]:
        """The lines as they stand at the end, without the live line below them."""
        shown = re.sub(r"\x1b7\x1b\[30;1H.*?\x1b8", "", self.text)
        lines = STYLE.sub("", shown).replace("\r\n", "\n").split("\n")
        return [line.rpartition("\r")[2] for line in lines]


@contextmanager
def terminal(folder: Path, *argv: str) -> Iterator[Terminal]:
    shown = Terminal(folder, *argv)
    try:
        yield shown
    finally:
        with contextlib.suppress(ProcessLookupError):
            shown.process.kill()
        shown.process.wait()
        os.close(shown.master)


def test_run_in_a_pipe_begins_with_two_lines_of_its_own(folder: Path) -> None:
    argv = ["--nproc-per-node", "2", "--state-dir", "state", "train.py", "40"]
    with launched(folder, *argv, EVERSTEP_LAUNCH_VERBOSE="false", **SLOW_RANKS) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0
    own = [line for line in launcher.err.splitlines() if line.startswith(("everstep-launch: ", "everstep: "))]
    receipt = next(number for number, line in enumerate(own) if " finished at step 40: " in line)
    assert [re.sub(r"\d gaps?", "GAPS", re.sub(r"train-\w+", "JOB", line)) for line in own[:receipt]] == [
        f"everstep-launch: job JOB, 2 ranks, OMP_NUM_THREADS=1; to watch: everstep open JOB --state-dir {folder}/state",
        "everstep: audits (light) check all modules, GAPS; list: everstep logs JOB --launcher",
    ]
    assert all("everstep" not in line for line in launcher.err.splitlines() if line not in own), "a line inside a bar"
    assert launcher.out == "first line of the script\nterminal: False False\n"
    (kept,) = kept_outputs(folder / "state")
    texts = [line.text for line in last_lines([("0", kept.files()[0])], 100)]
    assert "first line of the script" in texts
    lines = [line.text for line in last_lines([("", kept.path / "launcher.log")], 100)]
    assert any("generation 1, 2 ranks" in line for line in lines)
    assert any("[rank 0] everstep: audits (light): all modules with parameters are checked" in line for line in lines)


@pytest.mark.parametrize("times", [1, 2])
def test_nothing_follows_the_receipt_at_ctrl_c(folder: Path, times: int) -> None:
    with terminal(folder, "--nproc-per-node", "2", "train.py", "100000") as shown:
        shown.read_until(r"terminal: True True")
        shown.read_until(r"steps/s")  # the live line
        titles = sorted(title for title in titles_below(shown.process.pid) if title.startswith("everstep: "))
        shown.press_ctrl_c()
        if times == 2:
            shown.read_until(r"a second signal ends at once")
            shown.press_ctrl_c()
        assert shown.wait() == 130
    lines = [line for line in shown.lines if line]
    assert lines[-1].startswith("everstep-launch: receipt: "), shown.text
    own = [line.removeprefix("^C") for line in lines if "everstep" in line]  # the kernel's echo may come at any time
    assert [line for line in own if not line.startswith(("everstep-launch: ", "everstep: "))] == [], shown.text
    for noise in ("Traceback", "KeyboardInterrupt", "resource_tracker"):
        assert noise not in shown.text
    if importlib.util.find_spec("setproctitle") is not None:
        named = [re.sub(r"train-\w+", "JOB", title) for title in titles]
        *ranks, standby = (f"everstep: {role} of JOB (train.py)" for role in ("rank 0", "rank 1", "standby"))
        assert [title for title in named if title != standby] == ranks  # the standby may be forked later


def titles_below(pid: int) -> list[str]:
    processes = read_processes()
    found = [pid]
    for ancestor in found:
        found += [process.pid for process in processes.values() if process.parent == ancestor]
    return [" ".join(processes[process_id].arguments).rstrip("\0") for process_id in found if process_id in processes]


def test_launcher_without_stdout_runs_its_script(short_path: Path) -> None:
    (short_path / "plain.py").write_text("import sys; print('shown', sys.stdout is None, file=sys.stderr)")
    command = f"exec {sys.executable} -m everstep_trainer.launch --standbys 0 --state-dir state plain.py >&-"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], cwd=short_path, env=environ, stderr=subprocess.PIPE, check=True)
    assert done.stderr.decode().splitlines()[-1] == "shown False"
