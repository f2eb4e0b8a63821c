"""Run files of tests side by side in processes that are forked after the collection: ``pytest --workers 4``.

Collection imports everything that tests import, which takes seconds of CPU. The workers share the result. Each takes
another file when it has done one, and sends its reports to the session's process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from contextlib import nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from everstep.parent_process import die_with_parent
from tests.support.forked import leave, shared_imports

ENDING_S = 60.0
"""Seconds that a worker has for the end of its fixtures if the session ends early."""
INTERRUPTED = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that share the files; 0: this one alone")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("workers")
    if count == 0 or session.config.option.collectonly or session.testsfailed:
        return None
    files: dict[Path, list[int]] = {}
    for number, item in enumerate(session.items):
        files.setdefault(item.path, []).append(number)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "an import of the tests has started threads, which forked workers lack: move it to a fixture"
        )
    workers = Workers(session, deque(files.values()))
    start_processes = any(item.get_closest_marker("slow") for item in session.items)
    with shared_imports() if start_processes else nullcontext():
        workers.run(min(count, len(files)))
    return True


class Ready(NamedTuple):
    """A worker's message: it takes another file."""


class Started(NamedTuple):
    """A worker's message before each test."""

    nodeid: str
    location: tuple[str, int | None, str]


class Reported(NamedTuple):
    """A worker's message with one report of its test."""

    content: dict[str, Any]


class Worker:
    """A forked worker, as the session's process sees it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.running: Started | None = None
        self.left: list[int] = []
        """Tests of its file that have not begun, as numbers among the session's."""

    def end(self) -> int:
        """Let the worker end its fixtures, kill it if that takes long, and return its exit status."""
        self.connection.close()
        timer = threading.Timer(ENDING_S, os.kill, (self.pid, signal.SIGKILL))
        timer.start()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # the pid is its own until it is reaped
        timer.cancel()
        timer.join()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Workers:
    """The workers of a session, and the files that none has taken yet."""

    def __init__(self, session: pytest.Session, files: deque[list[int]]) -> None:
        self._session, self._config, self._files = session, session.config, files
        self._workers: dict[Any, Worker] = {}
        self._started = 0
        self._folder: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def run(self, count: int) -> None:
        """Run all files. Raises what pytest's own loop raises."""
        try:
            for _ in range(count):
                self._start()
            while self._workers:
                for ready in wait(list(self._workers)):
                    self._receive(self._workers[ready])
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for worker in self._workers.values():
                worker.connection.close()  # of all, before the wait for one
            for worker in self._workers.values():
                worker.end()

    def _start(self) -> None:
        self._config.pluginmanager.getplugin("capturemanager").read_global_capture()  # a worker would show it again
        sys.stdout.flush()
        sys.stderr.flush()
        self._started += 1
        ours, theirs = Pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent)
            for connection in (ours, *self._workers):
                connection.close()
            serve(self._session, theirs, self._folder / f"worker-{self._started}")
        theirs.close()
        self._workers[ours] = Worker(pid, ours)

    def _receive(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._bury(self._workers.pop(worker.connection))
            return
        match message:
            case Ready():
                worker.running, worker.left = None, self._files.popleft() if self._files else []
                worker.connection.send(worker.left)
            case Started():
                worker.running, worker.left = message, worker.left[1:]
            case Reported(content):
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=content)
                self._config.hook.pytest_runtest_logreport(report=report)

    def _bury(self, worker: Worker) -> None:
        """Fail the test in which a worker died, and give what is left of the file to another worker. A test may end it
        with any status, also 0; without a test, a worker ends after it was told that no file is left."""
        status = worker.end()
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if worker.running is None and (status or worker.left):
            raise RuntimeError(f"a worker ended with status {status} outside of tests")
        if worker.running is not None:
            sentence = f"the worker ended with status {status} in this test"
            report = pytest.TestReport(*worker.running, {}, "failed", sentence, "call")
            self._config.hook.pytest_runtest_logreport(report=report)
            if worker.left:
                self._files.appendleft(worker.left)
            if self._files:
                self._start()


class Reporter:
    """Sends what happens in a worker to the session's process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(Started(nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(Reported(content))


def serve(session: pytest.Session, connection: Connection, folder: Path) -> NoReturn:
    """In a forked worker: run files of tests until there are no more, and exit."""
    status = 1
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        prepare(session.config, capture, connection, folder)
        try:
            while numbers := receive(connection):
                run_file(session, [session.items[number] for number in numbers])
        finally:
            session._setupstate.teardown_exact(None)
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (EOFError, ConnectionError):  # the session has ended early
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends
        capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        leave(status)


def prepare(config: pytest.Config, capture: Any, connection: Connection, folder: Path) -> None:
    """Give a worker what it must not share with others: output, folder for temporary files, random numbers."""
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    config.pluginmanager.register(Reporter(config, connection), "worker-reporter")


def receive(connection: Connection) -> list[int]:
    """Ask for another file; return its tests' numbers, none if all are taken."""
    connection.send(Ready())
    numbers: list[int] = connection.recv()
    return numbers


def run_file(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Run the tests of a file. Its fixtures end with the last one, those of the session do not."""
    following: list[pytest.Item | pytest.Session] = [*items[1:], session]
    for item, after in zip(items, following, strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if session.shouldfail or session.shouldstop:
            return
