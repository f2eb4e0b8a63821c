"""Regroup is raised only in the main thread, and only inside the training function."""

from __future__ import annotations

import ctypes
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as torch_modules

from everstep_trainer.base.interrupt import Interrupter, Regroup
from tests.support.processes.waiting import until

StartThread = Callable[[Callable[[], object]], threading.Thread]


def spin_until(condition: Callable[[], bool]) -> None:
    """Run Python code that never blocks, as a training function does between two collectives."""
    while not condition():
        pass


@pytest.fixture
def interrupter() -> Interrupter:
    return Interrupter()


@pytest.fixture
def start_thread() -> Iterator[StartThread]:
    threads: list[threading.Thread] = []

    def start(work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_profiler_works_after_a_run_that_was_not_interrupted() -> None:
    """In a process of its own: CPython never returns from a profiled call while it looks for an exception."""
    program = """
import sys
from everstep_trainer.base.interrupt import Interrupter
Interrupter().run(lambda: None)
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
(lambda: None)()
sys.setprofile(None)
assert "return" in calls, calls
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_function_in_python_code_ends_with_regroup(interrupter: Interrupter, start_thread: StartThread) -> None:
    started = threading.Event()

    def function() -> None:
        started.set()
        spin_until(lambda: False)

    start_thread(lambda: started.wait(60) and interrupter.interrupt())
    assert isinstance(interrupter.run(function), Regroup)


@pytest.mark.parametrize("wait", [lambda: Future().result(), lambda: queue.Queue().get(), lambda: time.sleep(3600)])
def test_function_waiting_in_python_code_is_interrupted(
    interrupter: Interrupter, start_thread: StartThread, wait: Callable[[], object]
) -> None:
    main, started = threading.get_ident(), threading.Event()
    kernel, looks = Path(f"/proc/self/task/{threading.get_native_id()}/status"), [""]

    def function() -> None:
        started.set()
        wait()

    def is_blocked() -> bool:
        """The thread sleeps in the kernel since the look before: a wake that comes earlier would be lost."""
        looks.append("".join(re.findall(r"^(?:State|\w*ctxt_switches):.*", kernel.read_text(), re.MULTILINE)))
        name = sys._current_frames()[main].f_code.co_name
        return name in ("wait", "<lambda>") and looks[-1] == looks[-2] and "(sleeping)" in looks[-1]

    def interrupt() -> None:
        started.wait(60)
        until(is_blocked, "it waits")
        interrupter.interrupt()

    start_thread(interrupt)
    assert isinstance(interrupter.run(function), Regroup)


def test_wake_signal_is_taken_back_from_a_library(interrupter: Interrupter, start_thread: StartThread) -> None:
    """Libraries written in Go set a handler of their own in C, of which Python knows nothing."""
    ignore = ctypes.c_void_p(1)  # SIG_IGN
    assert interrupter.run(lambda: None) is None
    ctypes.CDLL(None).signal(signal.SIGURG, ignore)
    started, ended, released = threading.Event(), threading.Event(), threading.Event()

    def function() -> None:
        started.set()
        released.wait()

    def interrupt() -> None:
        started.wait(60)
        interrupter.interrupt()
        if not ended.wait(20):
            released.set()

    start_thread(interrupt)
    failure = interrupter.run(function)
    ended.set()
    assert not released.is_set()
    assert isinstance(failure, Regroup)


def test_lost_wake_signal_is_sent_again(
    interrupter: Interrupter,
    start_thread: StartThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, sent = threading.Event(), []
    send = signal.pthread_kill

    def lose_first(*arguments: int) -> None:
        sent.append(arguments)
        if len(sent) > 1:
            send(*arguments)

    def function() -> None:
        started.set()
        time.sleep(3600)

    monkeypatch.setattr(signal, "pthread_kill", lose_first)
    start_thread(lambda: started.wait(60) and interrupter.interrupt())
    assert isinstance(interrupter.run(function), Regroup)


def test_wake_signals_end_with_the_exception(interrupter: Interrupter, start_thread: StartThread) -> None:
    """Signals disturb the script's own clean-up only for a short time."""
    started = threading.Event()

    def wakers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "_repeat_wakes" in thread.name]

    def function() -> None:
        started.set()
        try:
            time.sleep(3600)
        finally:
            for waker in wakers():
                waker.join(60)
            assert not wakers(), "signals go on during the clean-up"

    start_thread(lambda: started.wait(60) and interrupter.interrupt())
    assert isinstance(interrupter.run(function), Regroup)


def test_call_returns_none_or_the_error_of_the_function(interrupter: Interrupter) -> None:
    assert interrupter.run(lambda: None) is None
    error = ValueError("mine")

    def fail() -> None:
        raise error

    assert interrupter.run(fail) is error


def test_nothing_is_raised_outside_of_a_call(interrupter: Interrupter) -> None:
    assert interrupter.interrupt() is False
    interrupter.run(lambda: None)
    assert interrupter.interrupt() is False


def arrive(barrier: threading.Barrier) -> None:
    barrier.wait(60)


def test_late_interrupt_is_raised_before_the_run_ends(interrupter: Interrupter) -> None:
    for _ in range(200):
        barrier = threading.Barrier(2)

        def late(barrier: threading.Barrier = barrier) -> None:
            barrier.wait(60)
            interrupter.interrupt()

        thread = threading.Thread(target=late)
        thread.start()
        failure = interrupter.run(partial(arrive, barrier))
        thread.join()
        assert failure is None or isinstance(failure, Regroup)
        sum(range(100))  # a request that was left over would be raised here


def test_an_atomic_section_is_finished_first(interrupter: Interrupter, start_thread: StartThread) -> None:
    inside, asked = threading.Event(), threading.Event()
    written: list[str] = []

    def function() -> None:
        with interrupter.atomic():
            inside.set()
            spin_until(asked.is_set)
            written.append("whole")
        written.append("not reached")

    def ask() -> None:
        inside.wait(60)
        interrupter.interrupt()
        asked.set()

    start_thread(ask)
    assert isinstance(interrupter.run(function), Regroup)
    assert written == ["whole"]


def test_nested_atomic_sections_end_with_the_outermost(interrupter: Interrupter, start_thread: StartThread) -> None:
    inside, asked = threading.Event(), threading.Event()
    written: list[str] = []

    def function() -> None:
        with interrupter.atomic():
            with interrupter.atomic():
                inside.set()
                spin_until(asked.is_set)
            written.append("outer goes on")
        written.append("not reached")

    def ask() -> None:
        inside.wait(60)
        interrupter.interrupt()
        asked.set()

    start_thread(ask)
    assert isinstance(interrupter.run(function), Regroup)
    assert written == ["outer goes on"]


def test_a_call_is_interrupted_at_most_once(interrupter: Interrupter, start_thread: StartThread) -> None:
    started, caught = threading.Event(), threading.Event()
    second: list[bool] = []

    def function() -> None:
        started.set()
        try:
            spin_until(lambda: False)
        except Regroup:
            caught.set()
            spin_until(lambda: bool(second))
            raise

    def ask_twice() -> None:
        started.wait(60)
        interrupter.interrupt()
        caught.wait(60)
        second.append(interrupter.interrupt())

    start_thread(ask_twice)
    assert isinstance(interrupter.run(function), Regroup)
    assert second == [False]


def interrupt_once(interrupter: Interrupter, started: threading.Event) -> None:
    assert started.wait(60)
    interrupter.interrupt()


def test_each_call_can_be_interrupted_again(interrupter: Interrupter, start_thread: StartThread) -> None:
    for _ in range(3):
        started = threading.Event()

        def function(started: threading.Event = started) -> None:
            started.set()
            spin_until(lambda: False)

        start_thread(partial(interrupt_once, interrupter, started))
        assert isinstance(interrupter.run(function), Regroup)


def test_asked_thread_leaves_at_its_next_module_call(interrupter: Interrupter, start_thread: StartThread) -> None:
    layer = torch.nn.Linear(2, 2)
    started, asked = threading.Event(), threading.Event()
    passed: list[str] = []

    def function() -> None:
        started.set()
        spin_until(asked.is_set)
        passed.append("python code goes on")
        layer(torch.ones(1, 2))
        passed.append("not reached")

    def ask() -> None:
        started.wait(60)
        interrupter.request_regroup()
        asked.set()

    start_thread(ask)
    assert isinstance(interrupter.run(function), Regroup)
    assert passed == ["python code goes on"]


def test_asking_leaves_other_threads_and_later_calls_alone(interrupter: Interrupter, start_thread: StartThread) -> None:
    layer = torch.nn.Linear(2, 2)
    started, computed = threading.Event(), threading.Event()

    def ask_and_compute() -> None:
        started.wait(60)
        interrupter.request_regroup()
        layer(torch.ones(1, 2))
        computed.set()

    def function() -> None:
        started.set()
        spin_until(computed.is_set)

    start_thread(ask_and_compute)
    assert interrupter.run(function) is None
    assert not torch_modules._global_forward_pre_hooks
    assert interrupter.run(lambda: layer(torch.ones(1, 2)).sum() and None) is None


def test_an_atomic_section_may_call_modules(interrupter: Interrupter, start_thread: StartThread) -> None:
    layer = torch.nn.Linear(2, 2)
    started, asked = threading.Event(), threading.Event()
    written: list[str] = []

    def function() -> None:
        with interrupter.atomic():
            started.set()
            spin_until(asked.is_set)
            layer(torch.ones(1, 2))
            written.append("whole")
        layer(torch.ones(1, 2))
        written.append("not reached")

    def ask() -> None:
        started.wait(60)
        interrupter.request_regroup()
        asked.set()

    start_thread(ask)
    assert isinstance(interrupter.run(function), Regroup)
    assert written == ["whole"]


def test_exception_handlers_let_regroup_pass() -> None:
    assert not issubclass(Regroup, Exception)
