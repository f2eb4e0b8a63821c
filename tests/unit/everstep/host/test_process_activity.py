"""Working and still processes, distinguished by two samples of /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from everstep.host.process_activity import ProcessSample, Work, find_work, sample_process
from everstep.system_clock import SYSTEM_CLOCK
from tests.support.processes.waiting import until

STILL = ProcessSample(at=10.0, state="S", cpu_s=5.0, starved_s=1.0, io_bytes=1000, children_cpu_s=2.0, wake_ups=50)


@pytest.mark.parametrize(
    ("change", "work"),
    [
        ({}, None),
        ({"cpu_s": 5.02, "wake_ups": 51, "io_bytes": 2000}, None),
        ({"cpu_s": 5.1}, Work.COMPUTES),
        ({"cpu_s": 5.01, "starved_s": 1.9}, Work.STARVED),
        ({"io_bytes": 60_000}, Work.TRANSFERS),
        ({"children_cpu_s": 2.5}, Work.CHILDREN),
        ({"children_io_bytes": 60_000}, Work.CHILDREN),
        ({"wake_ups": 60}, Work.POLLS),
        ({"is_traced": True}, Work.DEBUGGED),
    ],
)
def test_work_is_derived_from_changes_in_a_second(change: dict[str, object], work: Work | None) -> None:
    assert find_work(STILL, msgspec.structs.replace(STILL, at=11.0, **change)) == work


@contextmanager
def running(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", f"print('ready', flush=True)\n{code}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def shows(pid: int, work: Work | None) -> bool:
    first = sample_process(pid, SYSTEM_CLOCK.monotonic())
    time.sleep(0.3)
    second = sample_process(pid, SYSTEM_CLOCK.monotonic())
    return first is not None and second is not None and find_work(first, second) == work


READS = (
    "import time\nwhile True:\n open('/proc/self/maps').read(); open('/dev/zero','rb').read(1 << 20); time.sleep(0.1)"
)
CHILD = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"


@pytest.mark.parametrize(
    ("code", "work"),
    [
        ("import threading\nthreading.Lock().acquire()\nimport time; time.sleep(3600)", None),
        ("while True: pass", Work.COMPUTES),
        ("import time\nwhile True: time.sleep(0.05)", Work.POLLS),
        (READS, Work.TRANSFERS),
    ],
)
def test_living_process_shows_its_work(code: str, work: Work | None) -> None:
    with running(code) as pid:
        until(lambda: shows(pid, work), f"{work} is seen")


def test_working_children_count_for_their_parent() -> None:
    with running(f"import os, signal\nos.setpgid(0, 0)\n{CHILD}") as pid:
        try:
            until(lambda: shows(pid, Work.CHILDREN), "the child is seen")
        finally:
            os.killpg(pid, signal.SIGKILL)


def test_own_sampling_thread_does_not_count() -> None:
    """Reading /proc is I/O too, and must not keep its own process alive."""
    thread = os.getpid()  # the main thread is the sampling one here

    def look() -> ProcessSample:
        sample = sample_process(os.getpid(), SYSTEM_CLOCK.monotonic(), without_thread=thread)
        assert sample is not None
        return sample

    first = look()
    for _ in range(200):
        last = look()
    assert last.io_bytes - first.io_bytes < 200 * 1024
    assert last.cpu_s - first.cpu_s < last.at - first.at


def test_background_threads_do_not_count_among_the_others() -> None:
    ends = threading.Event()
    threads = [threading.Thread(target=lambda: [None for _ in iter(ends.is_set, True)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        background = {thread.native_id for thread in threads[:1] if thread.native_id is not None}

        def others_s(background: set[int]) -> float:
            sample = sample_process(os.getpid(), 0.0, without_thread=threading.get_native_id(), background=background)
            assert sample is not None
            return sample.others_cpu_s

        until(lambda: others_s(background) > 0.1, "the second thread is seen")
        until(lambda: others_s(set()) - others_s(background) > 0.1, "the first thread is seen")
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_zombie_has_no_sample() -> None:
    child = subprocess.Popen(["true"])
    try:
        until(lambda: sample_process(child.pid, 0.0) is None, "it ended")
    finally:
        child.wait()
    assert sample_process(child.pid, 0.0) is None
