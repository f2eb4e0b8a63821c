"""Processes are read from /proc, and a signal reaches the process that was read or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.host.parent_process import die_with_parent
from everstep.host.processes import (
    Process,
    continued_at_end,
    has_signal_handler,
    read_environment,
    read_process,
    read_processes,
    send_signal,
    status_field,
)
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until

SLEEPER = "import signal; signal.signal(signal.SIGUSR2, print); print(flush=True); input()"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SLEEPER]
    environment = {**os.environ, "MARK": "a=b"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def read(pid: int) -> Process:
    found = read_process(pid)
    assert found is not None
    return found


def test_process_is_read_with_parent_and_environment(sleeper: subprocess.Popen[bytes]) -> None:
    found = read_processes()[sleeper.pid]
    assert (found.parent, found.user, found.arguments[-1]) == (os.getpid(), os.geteuid(), SLEEPER)
    assert read_environment(sleeper.pid)["MARK"] == "a=b"
    assert has_signal_handler(sleeper.pid, signal.SIGUSR2)
    assert not has_signal_handler(sleeper.pid, signal.SIGUSR1)


def test_name_with_brackets_does_not_shift_fields(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"a\0b c\0")
    rest = " ".join(str(number) for number in range(3, 22))
    (folder / "stat").write_text(f"7 (odd) S 1 (x) S 42 {rest}\n")
    found = read_process(7, tmp_path)
    assert found == Process(
        pid=7,
        parent=42,
        user=os.geteuid(),
        name="odd) S 1 (x",
        state="S",
        started=20,
        arguments=("a", "b c"),
    )
    assert read_processes(tmp_path) == {7: found}
    (folder / "stat").write_text(f"7 (odd) Z 42 {rest}\n")
    assert read_processes(tmp_path) == {}


def test_name_that_is_cut_within_a_character_is_read(tmp_path: Path) -> None:
    folder, name = tmp_path / "7", "обучение".encode()[:15]
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"a")
    (folder / "stat").write_bytes(b"7 (" + name + b") S " + b" ".join(b"%d" % number for number in range(1, 22)))
    (folder / "status").write_bytes(b"Name:\t" + name + b"\nSigCgt:\t0000000000000200\n")
    found = read_process(7, tmp_path)
    assert found is not None
    assert found.state == "S"
    assert status_field(7, "SigCgt", tmp_path) == "0000000000000200"


def test_gone_process_has_nothing() -> None:
    gone = 1 << 22
    assert read_process(gone) is None
    assert read_environment(gone) == {}
    assert not has_signal_handler(gone, signal.SIGUSR1)


def test_reused_pid_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    now = read(sleeper.pid)
    earlier = msgspec.structs.replace(now, started=now.started - 1)
    assert not send_signal(earlier, signal.SIGKILL)
    assert send_signal(now, signal.SIGKILL)
    assert sleeper.wait(60) == -signal.SIGKILL
    assert not send_signal(now, signal.SIGKILL)


def test_stopped_process_continues_at_the_end(sleeper: subprocess.Popen[bytes]) -> None:
    process = read(sleeper.pid)
    with continued_at_end(process):
        send_signal(process, signal.SIGSTOP)
        until(lambda: read(sleeper.pid).state == "T", "the process is stopped")
    assert read(sleeper.pid).state != "T"


def test_stopped_process_continues_if_its_stopper_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    script = (
        "import os, signal\n"
        "from everstep.host.processes import *\n"
        f"process = read_process({sleeper.pid})\n"
        "with continued_at_end(process):\n"
        "    send_signal(process, signal.SIGSTOP)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    until(lambda: read(sleeper.pid).state != "T", "the process runs again")


FOLLOWER = """
import os, signal, sys, time
from everstep.host.parent_process import PARENT_VARIABLE, die_with_parent
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


def test_invalid_signal_raises_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot follow the parent's end: Invalid argument"):
        die_with_parent(os.getppid(), 4096)  # type: ignore[arg-type]
