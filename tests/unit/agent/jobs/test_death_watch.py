"""Deaths of processes recognised by robust mutexes, and states that look like a death and are none."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from everstep.host.robust_mutex import OWNER_DIED, WAITERS, is_held, is_supported, make_memory
from everstep_agent.jobs import death_watch
from everstep_agent.jobs.death_watch import DeathWatch, open_watch, read_end
from everstep_agent.jobs.local_processes import ProcessEnd

DEADLINE_S = 60.0
KILLED = ProcessEnd(signal=signal.SIGKILL)
ENDED = (KILLED, ProcessEnd())
"""What is known of a killed process: nothing if nothing of it was left when it was looked at."""
needs_futex = pytest.mark.skipif(not is_supported(), reason="no futex call is known for this machine")


class WatchedProcess:
    """A process that holds a mutex, and the watch of it."""

    def __init__(self, who: str = "main", *prefix: str) -> None:
        self.deaths: SimpleQueue[ProcessEnd] = SimpleQueue()
        descriptor = make_memory()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.agents.mutex_holder", str(descriptor), who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            pass_fds=(descriptor,),
        )
        self.inner_pid = int(self._answer().removeprefix("held "))
        self.pid = self._innermost(self.process.pid) if prefix else self.process.pid
        pidfd = os.pidfd_open(self.pid)
        self.watch = DeathWatch(self.pid, pidfd, descriptor, self.deaths.put)
        os.close(pidfd)

    def _innermost(self, pid: int) -> int:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return self._innermost(int(children[0])) if children else pid

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send_order(self, order: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        return self._answer()

    def start(self) -> None:
        self.watch.start_if_locked()
        assert self.watch._thread is not None

    def wait_for_death(self) -> ProcessEnd:
        return self.deaths.get(timeout=DEADLINE_S)

    def assert_alive(self) -> None:
        assert self.deaths.empty()
        assert is_held(self.watch._word.read())

    def assert_watch_ended_without_death(self) -> None:
        assert self.watch._thread is not None
        self.watch._thread.join(DEADLINE_S)
        assert not self.watch._thread.is_alive()
        assert self.deaths.empty()

    def end(self) -> None:
        self.watch.close()
        if self.watch._thread is not None:
            self.watch._thread.join(DEADLINE_S)
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def process(who: str, *prefix: str) -> Iterator[WatchedProcess]:
    watched = WatchedProcess(who, *prefix)
    try:
        yield watched
    finally:
        watched.end()


@pytest.fixture
def watched() -> Iterator[WatchedProcess]:
    with process("main") as watched:
        yield watched


@pytest.fixture
def threaded() -> Iterator[WatchedProcess]:
    with process("thread") as watched:
        yield watched


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death_watch, "CONFIRM_PAUSES_S", (0.0, 0.01))


@needs_futex
def test_killed_process_is_dead_before_it_is_reaped(watched: WatchedProcess) -> None:
    watched.start()
    watched.process.kill()
    assert watched.wait_for_death() in ENDED


@needs_futex
def test_exit_is_a_death_with_its_status(threaded: WatchedProcess) -> None:
    threaded.start()
    assert threaded.send_order("exit 3") == ""
    assert threaded.wait_for_death() in (ProcessEnd(exit_code=3), ProcessEnd())


@needs_futex
def test_death_before_the_watch_starts_is_noticed(watched: WatchedProcess) -> None:
    watched.process.kill()
    watched.process.wait()
    watched.start()
    assert watched.wait_for_death() == ProcessEnd()


@needs_futex
def test_forked_child_does_not_hold_the_mutex(watched: WatchedProcess) -> None:
    watched.start()
    assert watched.send_order("fork") == "done"  # the child has ended
    watched.assert_alive()
    watched.process.kill()
    assert watched.wait_for_death() in ENDED


@needs_futex
def test_stopped_process_is_not_dead(watched: WatchedProcess) -> None:
    watched.start()
    watched.process.send_signal(signal.SIGSTOP)
    os.waitpid(watched.process.pid, os.WUNTRACED)
    watched.assert_alive()
    watched.process.send_signal(signal.SIGCONT)
    assert watched.send_order("nothing") == "done"
    watched.assert_alive()


@needs_futex
@pytest.mark.parametrize("who", ["main", "thread"])
@pytest.mark.usefixtures("quick")
def test_exec_is_not_a_death(who: str) -> None:
    with process(who) as watched:
        watched.start()
        assert watched.send_order("exec") == "ready"
        watched.assert_watch_ended_without_death()


@needs_futex
@pytest.mark.usefixtures("quick")
def test_end_of_the_holding_thread_is_not_a_death(threaded: WatchedProcess) -> None:
    threaded.start()
    assert threaded.send_order("end-thread") == "done"
    threaded.assert_watch_ended_without_death()


@needs_futex
def test_unmapped_mutex_tells_nothing(watched: WatchedProcess) -> None:
    watched.start()
    assert watched.send_order("unmap") == "done"
    watched.assert_alive()
    watched.process.kill()
    watched.process.wait()
    watched.assert_alive()  # the end of the connection tells


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@needs_futex
@pytest.mark.skipif(not _can_unshare(), reason="process namespaces cannot be made here")
def test_death_in_another_process_namespace_is_noticed() -> None:
    """In a container below the agent's namespace, the mutex holds a number that means another process here."""
    with process("main", "unshare", "--pid", "--fork") as watched:
        assert watched.inner_pid == 1 != watched.pid
        watched.start()
        os.kill(watched.pid, signal.SIGKILL)
        assert watched.wait_for_death() in ENDED


# --- what a process may write into its memory; this one plays the rank, and is alive


@pytest.fixture
def own() -> Iterator[tuple[DeathWatch, mmap.mmap, SimpleQueue[ProcessEnd]]]:
    deaths: SimpleQueue[ProcessEnd] = SimpleQueue()
    pidfd = os.pidfd_open(os.getpid())
    watch = DeathWatch(os.getpid(), pidfd, make_memory(), deaths.put)
    with mmap.mmap(watch.descriptor, mmap.PAGESIZE) as memory:
        yield watch, memory, deaths
    watch.close()
    os.close(pidfd)


def _write(memory: mmap.mmap, word: int) -> None:
    memory[:4] = word.to_bytes(4, "little")


@needs_futex
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", [WAITERS | 7, OWNER_DIED, WAITERS | OWNER_DIED | 7, 0xFFFF_FFFF])
@pytest.mark.parametrize("then", [0, 7, 0xDEAD_BEEF & ~OWNER_DIED, OWNER_DIED, 0xFFFF_FFFF])
def test_garbage_in_the_memory_is_not_a_death(
    own: tuple[DeathWatch, mmap.mmap, SimpleQueue[ProcessEnd]], first: int, then: int
) -> None:
    watch, memory, deaths = own
    _write(memory, first)
    watch.start_if_locked()
    thread = watch._thread
    assert thread is not None
    memory.write(os.urandom(mmap.PAGESIZE))
    _write(memory, then)
    while thread.is_alive():
        if thread.is_alive() and not watch._closed.is_set():
            watch._word.wake()
        thread.join(0.001)
    assert deaths.empty()


@needs_futex
@pytest.mark.parametrize("word", [0, 7, WAITERS])
def test_memory_without_a_holder_starts_no_thread(
    own: tuple[DeathWatch, mmap.mmap, SimpleQueue[ProcessEnd]], word: int
) -> None:
    watch, memory, _ = own
    _write(memory, word)
    watch.start_if_locked()
    assert watch._thread is None


@needs_futex
def test_agent_without_threads_left_goes_without_a_watch(
    own: tuple[DeathWatch, mmap.mmap, SimpleQueue[ProcessEnd]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watch, memory, _ = own
    _write(memory, WAITERS | 7)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        watch.start_if_locked()
    assert watch._thread is None


def test_process_outside_this_namespace_is_not_watched() -> None:
    assert open_watch(0, -1, lambda _: None) is None


# --- how a process ends, by the kernel's files

RUNS, EXITS, KILL_PENDING = (0x40_0040, 0), (0x40_0044, 0), (0x40_0040, 1 << 8)


def _stat(state: str, flags: int, pending: int, status: int) -> str:
    fields = ["0"] * 50
    fields[0], fields[6], fields[28], fields[49] = state, str(flags), str(pending), str(status)
    return "7 (a name) with (brackets) " + " ".join(fields)


def _processes(folder: Path, status: int, *threads: tuple[int, int]) -> Path:
    for number, (flags, pending) in enumerate(threads):
        thread = folder / "7" / "task" / str(7 + number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(_stat("R", flags, pending, status))
    (folder / "7" / "stat").write_text(_stat("R", threads[0][0], 0, status))
    return folder


@pytest.fixture
def living() -> Iterator[int]:
    pidfd = os.pidfd_open(os.getpid())
    yield pidfd
    os.close(pidfd)


@pytest.mark.parametrize(
    ("status", "threads", "end"),
    [
        (9, (EXITS, EXITS), KILLED),
        (9, (EXITS, KILL_PENDING), KILLED),
        (9 | 0x80, (EXITS,), KILLED),
        (3 << 8, (EXITS, EXITS), ProcessEnd(exit_code=3)),
        (0, (EXITS,), ProcessEnd()),
        (9, (EXITS, RUNS), None),
        (0, (RUNS, EXITS), None),
        (0, (RUNS,), None),
    ],
    ids=["killed", "kill_pending", "dumped", "exited", "unknown", "thread_lives", "main_lives", "lives"],
)
def test_process_ends_only_if_all_its_threads_do(
    tmp_path: Path, living: int, status: int, threads: tuple[tuple[int, int], ...], end: ProcessEnd | None
) -> None:
    assert read_end(7, living, _processes(tmp_path, status, *threads)) == end


def test_process_that_proc_does_not_show_is_not_dead(tmp_path: Path, living: int) -> None:
    assert read_end(7, living, tmp_path) is None
