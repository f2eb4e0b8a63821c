"""A trial of another policy is a process of its own, which nobody outlives in vain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep_controller.journal.recorder import SUFFIX
from everstep_controller.rulebook import with_rules

from everstep.errors import MalformedMessage
from everstep.wire.v1.operator_history import PolicyChange, PolicyTrialRequest

WANTED = PolicyTrialRequest(change=PolicyChange())
_CONTROLLER = """
import asyncio, sys
from everstep_controller.core.policy import CorePolicy
from everstep_controller.rulebook import with_rules
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep.wire.v1.operator_history import PolicyChange, PolicyTrialRequest
wanted = PolicyTrialRequest(change=PolicyChange())
asyncio.run(PolicyTrialRunner(sys.argv[1]).run(with_rules(CorePolicy.lab_preset()), wanted, 1.0))
"""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A journal whose segment nobody ever writes: who reads it waits."""
    folder = tmp_path / "journal"
    folder.mkdir()
    os.mkfifo(folder / f"{0:015d}-1{SUFFIX}")
    return folder


@pytest.fixture
def is_read(endless: Path) -> Iterator[Callable[[], bool]]:
    """Whether a trial has come to the segment; from then on it waits for what is in there."""
    (segment,) = endless.iterdir()
    held: list[int] = []

    def there() -> bool:
        with contextlib.suppress(OSError):  # ENXIO: nobody has it open
            held.append(os.open(segment, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    yield there
    for descriptor in held:
        os.close(descriptor)


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.perf_counter() + 60.0
    while not condition():
        assert time.perf_counter() < end, what
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    return [int(child) for tasks in Path(f"/proc/{pid}/task").iterdir() for child in _text(tasks / "children").split()]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _is_gone(pid: int) -> bool:
    state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return not state or state[0] == "Z"


def test_trial_process_ends_with_killed_controller(endless: Path, is_read: Callable[[], bool]) -> None:
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, str(endless)]) as controller:
        _until(is_read, "the trial has begun")
        started = _children(controller.pid)
        assert started
        controller.send_signal(signal.SIGKILL)
    _until(lambda: all(map(_is_gone, started)), f"{started} end with it")


def test_cancelled_trial_process_is_ended(endless: Path, is_read: Callable[[], bool]) -> None:
    before = set(_children(os.getpid()))

    async def broken_off() -> set[int]:
        trials = PolicyTrialRunner(str(endless))
        waited = asyncio.ensure_future(trials.run(with_rules(CorePolicy.lab_preset()), WANTED, 1.0))
        await asyncio.to_thread(_until, is_read, "the trial has begun")
        started = set(_children(os.getpid())) - before
        waited.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waited
        return started

    started = asyncio.run(broken_off())
    assert started
    _until(lambda: all(map(_is_gone, started)), f"{started} end with it")


def test_trial_error_message_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / f"{0:015d}-1{SUFFIX}").write_bytes(b"no journal")
    with pytest.raises(MalformedMessage, match="journal"):
        asyncio.run(PolicyTrialRunner(str(tmp_path)).run(with_rules(CorePolicy.lab_preset()), WANTED, 1.0))
