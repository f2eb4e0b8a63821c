"""Another thread recognises whether the main thread works, stands still or waits in a collective."""

from __future__ import annotations

import os
import pdb
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import RankActivity
from everstep_trainer.base import interrupt
from everstep_trainer.base.progress import StepProgress
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadObserver, MainThreadState, script_stack

DEADLINE_S = 120.0
SETTINGS = HookSettings(busy_loop_s=0.3)


class MainThreadWatch:
    """A thread that observes the main thread until it is in a given state, and then ends its work."""

    def __init__(self, progress: StepProgress, seen: Callable[[MainThreadState], bool]) -> None:
        self._observer = MainThreadObserver(SETTINGS, SYSTEM_CLOCK, progress)
        self._seen = seen
        self.state = MainThreadState()
        self.released = threading.Event()
        self.on_release: list[Callable[[], object]] = [self.released.set]
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        end = SYSTEM_CLOCK.monotonic() + DEADLINE_S
        while SYSTEM_CLOCK.monotonic() < end and not self._seen(self.state):
            self.state = self._observer.observe()
            time.sleep(0.05)
        for release in self.on_release:
            release()

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._thread.join()
        assert self._seen(self.state), self.state


def watched(activity: RankActivity, doing: str = "", progress: StepProgress | None = None) -> MainThreadWatch:
    progress = progress or StepProgress(window=3)
    return MainThreadWatch(progress, lambda state: state.activity is activity and doing in state.doing)


def test_unreleased_lock_is_still() -> None:
    scene, lock = watched(RankActivity.STILL), threading.Lock()
    lock.acquire()
    scene.on_release.append(lock.release)
    with scene.watching():
        lock.acquire()
    assert scene.state.place.startswith("test_activity.py:")


def test_sleep_is_still() -> None:
    scene = watched(RankActivity.STILL)
    with scene.watching():
        while not scene.released.is_set():
            time.sleep(1.5)


def test_computation_is_work() -> None:
    scene, numbers = watched(RankActivity.WORKING, "computes"), list(range(100_000))
    with scene.watching():
        while not scene.released.is_set():
            sorted(numbers, key=lambda number: -number)


def test_working_child_is_work() -> None:
    scene = watched(RankActivity.WORKING, "child")
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    scene.on_release.append(child.kill)
    with scene.watching():
        child.wait()


def test_polling_is_work() -> None:
    scene = watched(RankActivity.WORKING)
    with scene.watching():
        while not scene.released.is_set():
            time.sleep(0.02)


def test_writing_is_work(tmp_path: Path) -> None:
    scene = watched(RankActivity.WORKING)
    with scene.watching(), open(tmp_path / "file", "wb") as file:
        while not scene.released.is_set():
            file.write(bytes(1 << 20))
            file.seek(0)
            os.fsync(file.fileno())


def test_section_is_work_whatever_the_process_does() -> None:
    progress = StepProgress(window=3)
    scene = watched(RankActivity.WORKING, progress=progress)
    with scene.watching(), progress.section("validation", 60.0):
        scene.released.wait()
    section = scene.state.section
    assert section is not None
    assert (section.name, section.limit_s) == ("validation", 60.0)


def test_debugger_prompt_is_work() -> None:
    scene, reading = watched(RankActivity.WORKING, "debugged"), os.pipe()
    scene.on_release.append(lambda: os.write(reading[1], b"continue\n"))
    with scene.watching(), open(reading[0]) as answers, open(os.devnull, "w") as prompt:
        pdb.Pdb(stdin=answers, stdout=prompt, nosigint=True, readrc=False).set_trace()
        scene.released.wait()
    os.close(reading[1])
    sys.settrace(None)


def spin(stop: list[bool]) -> None:
    while True:
        if stop:
            return


def count(stop: list[bool]) -> int:
    number = 0
    while True:
        number += 1
        if stop:
            return number


def test_loop_that_changes_nothing_is_a_busy_loop() -> None:
    scene, stop = watched(RankActivity.BUSY_LOOP), []
    scene.on_release.append(lambda: stop.append(True))
    with scene.watching():
        spin(stop)


def test_loop_that_counts_is_work() -> None:
    progress, stop = StepProgress(window=3), []
    scene = MainThreadWatch(progress, lambda state: state.activity is RankActivity.WORKING and state.place_s > 2.0)
    scene.on_release.append(lambda: stop.append(True))
    with scene.watching():
        count(stop)


def test_spinning_wait_for_a_working_thread_is_work() -> None:
    progress, stop = StepProgress(window=3), []
    ends: list[bool] = []
    scene = MainThreadWatch(progress, lambda state: state.activity is RankActivity.WORKING and state.place_s > 1.0)
    scene.on_release.append(lambda: stop.append(True))
    worker = threading.Thread(
        target=lambda: [torch.ones(200, 200) @ torch.ones(200, 200) for _ in iter(lambda: bool(ends), True)]
    )
    worker.start()
    try:
        with scene.watching():
            spin(stop)
    finally:
        ends.append(True)
        worker.join()


def test_backward_that_waits_in_several_ranks_is_a_collective() -> None:
    """DistributedDataParallel waits for its all-reduces in C++, at the end of the backward pass."""
    progress = StepProgress(window=3)
    progress.enter(1, lambda: 0, world_size=2)
    scene = watched(RankActivity.COLLECTIVE, "backward", progress)
    lock = threading.Lock()
    lock.acquire()
    scene.on_release.append(lock.release)
    with scene.watching():
        frame_named("_engine_run_backward", lock)()


@pytest.mark.parametrize(
    ("module", "activity"),
    [
        ("torch.distributed.distributed_c10d", RankActivity.COLLECTIVE),
        ("torch.distributed.checkpoint.filesystem", RankActivity.STILL),  # flushes a file to a slow server
    ],
)
def test_library_that_waits_for_ranks_is_in_a_collective(module: str, activity: RankActivity) -> None:
    progress = StepProgress(window=3)
    progress.enter(1, lambda: 0, world_size=2)
    scene, lock = watched(activity, progress=progress), threading.Lock()
    lock.acquire()
    scene.on_release.append(lock.release)
    with scene.watching():
        frame_named("write_files", lock, module)()


def frame_named(name: str, lock: threading.Lock, module: str = "script") -> Callable[[], object]:
    """Return a function of that name and module that waits for the lock."""
    space: dict[str, Any] = {"lock": lock, "__name__": module}
    exec(f"def {name}():\n    lock.acquire()", space)
    function: Callable[[], object] = space[name]
    return function


def test_awaited_operation_is_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, lock = watched(RankActivity.COLLECTIVE, "all_reduce"), threading.Lock()
    monkeypatch.setattr(interrupt, "_awaited", 1)
    monkeypatch.setattr(interrupt, "has_only_collectives_of_all", lambda: True)
    lock.acquire()
    scene.on_release.append(lock.release)
    with scene.watching():
        lock.acquire()
    assert scene.state.waits_for_all


def test_collective_that_transfers_beside_a_gpu_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective on host tensors; one that a GPU computes reads and writes nothing."""
    progress = StepProgress(window=3)
    progress.enter(1, lambda: 0, world_size=2, uses_gpu=True)
    monkeypatch.setattr(interrupt, "_awaited", 1)
    monkeypatch.setattr(interrupt, "has_only_collectives_of_all", lambda: True)
    scene = MainThreadWatch(progress, lambda state: state.activity is RankActivity.COLLECTIVE and state.transfers)
    with scene.watching(), open(tmp_path / "file", "wb", buffering=0) as file:
        while not scene.released.wait(0.1):
            file.write(bytes(1 << 16))


def test_script_stack_leaves_libraries_out() -> None:
    lines = script_stack().splitlines()
    assert 0 < len(lines) <= 10
    assert not any("site-packages" in line for line in lines)
    assert "test_activity.py" in "".join(lines)
