"""Merge the trials of one policy change on the journals of several controllers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import Conflict, EverstepError, MalformedMessage, NotFound, Unavailable
from everstep.policy_trial_results import FAILOVER_S, merge_results, recording_gaps
from everstep.wire.v1.operator_history import PolicyChange, PolicyTrialRequest, PolicyTrialResult, RecordedSpan
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.policy_replay import PolicyTrialRunner, replay_with_policy
from everstep_controller.journal.recorder import SUFFIX, Journal, segments
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet.core_fleet import START
from tests.support.fleet.findings import xid
from tests.support.fleet.journaled_fleet import JournaledFleet

A, B, C = "https://a:7700", "https://b:7700", "https://c:7700"


def _follow(fleet: JournaledFleet, folder: Path) -> None:
    """Make the controller whose journal is `folder` the next leader."""
    fleet.journal.close()
    fleet.journal = Journal(folder, max_bytes=1 << 30, keep_s=86400.0)
    fleet.epoch += 1
    fleet.now += 1.0
    fleet.restart()
    fleet.mark_seen(*(node for node in fleet.state.nodes))
    fleet.advance(3.0, *fleet.state.nodes)


def _past(tmp_path: Path) -> JournaledFleet:
    """Controllers a, b and a lead in turn; each of them evicts one node."""
    fleet = JournaledFleet(tmp_path / "a")
    fleet.start(6, 2)
    fleet.seal(5)
    fleet.raise_finding("n2", xid(79))
    for folder, node, number in (("b", "n3", 48), ("a", "n4", 95)):
        fleet.advance(8.0, *fleet.state.nodes)
        _follow(fleet, tmp_path / folder)
        fleet.raise_finding(node, xid(number))
    fleet.journal.close()
    return fleet


def _tried(fleet: JournaledFleet, folder: Path, since: float = START, **knobs: Any) -> PolicyTrialResult:
    return replay_with_policy(folder, fleet.policy.with_values(**knobs), since)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_merged_trials_equal_a_single_trial(tmp_path: Path, count: int) -> None:
    fleet = _past(tmp_path)
    (tmp_path / "all").mkdir()
    for segment in (*segments(tmp_path / "a"), *segments(tmp_path / "b")):
        shutil.copy(segment, tmp_path / "all")
    whole = _tried(fleet, tmp_path / "all", budget={"count": count})
    parts = {url: _tried(fleet, tmp_path / name, budget={"count": count}) for url, name in ((A, "a"), (B, "b"))}
    merged = merge_results(parts)
    assert sorted(merged.avoided_evictions) == sorted(whole.avoided_evictions)
    assert (
        msgspec.structs.replace(merged, avoided_evictions=whole.avoided_evictions) == whole
    )  # the lines carry no time, so their order may differ
    assert (whole.gaps, len(whole.avoided_evictions)) == ((), {1: 2, 2: 1, 4: 0}[count])


def test_unreachable_controller_is_reported_as_gap(tmp_path: Path) -> None:
    fleet = _past(tmp_path)
    merged = merge_results({A: _tried(fleet, tmp_path / "a"), B: Unavailable("no answer")})
    assert (merged.evictions, len(merged.gaps)) == (2, 1)
    assert merged.sentence.endswith("; https://b:7700 is not counted: no answer")


def test_merge_without_records_raises_the_reason() -> None:
    none: dict[str, PolicyTrialResult | EverstepError] = {
        A: NotFound("nothing is recorded in a"),
        B: Conflict("set journal_dir"),
    }
    with pytest.raises(Conflict, match="set journal_dir"):
        merge_results(none)
    with pytest.raises(NotFound, match="nothing is recorded in a"):
        merge_results({A: none[A]})


@pytest.mark.parametrize(
    ("epoch", "later", "missing"), [(8, 1.0, False), (8, FAILOVER_S + 1.0, True), (9, 1.0, True), (7, 1.0, True)]
)
def test_quick_failover_is_no_gap_but_missing_epoch_is(epoch: int, later: float, missing: bool) -> None:
    first = RecordedSpan(begins_at=0.0, ends_at=100.0, epoch=7)
    second = RecordedSpan(begins_at=100.0 + later, ends_at=200.0 + later, epoch=epoch)
    assert recording_gaps((second, first)) == (((100.0, 100.0 + later),) if missing else ())


WANTED = PolicyTrialRequest(change=PolicyChange())
_CONTROLLER = """
import asyncio, sys
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.rulebook import with_rules
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep.wire.v1.operator_history import PolicyChange, PolicyTrialRequest
wanted = PolicyTrialRequest(change=PolicyChange())
asyncio.run(PolicyTrialRunner(sys.argv[1]).run(with_rules(CorePolicy.lab_preset()), wanted, 1.0))
"""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A journal whose segment is a FIFO without a writer: a trial that reads it blocks."""
    folder = tmp_path / "journal"
    folder.mkdir()
    os.mkfifo(folder / f"{0:015d}-1{SUFFIX}")
    return folder


@pytest.fixture
def is_read(endless: Path) -> Iterator[Callable[[], bool]]:
    """Tell if a trial has opened the segment; from then on the trial waits for content."""
    (segment,) = endless.iterdir()
    held: list[int] = []

    def trial_reads() -> bool:
        with contextlib.suppress(OSError):  # ENXIO: the FIFO has no reader yet
            held.append(os.open(segment, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    yield trial_reads
    for descriptor in held:
        os.close(descriptor)


def _until(condition: Callable[[], bool], expected: str) -> None:
    end = time.perf_counter() + 60.0
    while not condition():
        assert time.perf_counter() < end, expected
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

    async def cancelled_trial() -> set[int]:
        trials = PolicyTrialRunner(str(endless))
        waited = asyncio.ensure_future(trials.run(with_rules(CorePolicy.lab_preset()), WANTED, 1.0))
        await asyncio.to_thread(_until, is_read, "the trial has begun")
        started = set(_children(os.getpid())) - before
        waited.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waited
        return started

    started = asyncio.run(cancelled_trial())
    assert started
    _until(lambda: all(map(_is_gone, started)), f"{started} end with it")


def test_trial_error_message_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / f"{0:015d}-1{SUFFIX}").write_bytes(b"no journal")
    with pytest.raises(MalformedMessage, match="journal"):
        asyncio.run(PolicyTrialRunner(str(tmp_path)).run(with_rules(CorePolicy.lab_preset()), WANTED, 1.0))
