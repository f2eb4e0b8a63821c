"""Ranks and peers in processes of their own, forked from a server that has torch imported; none outlives the bench."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from everstep.host.processes import Process, read_environment, read_processes

DEADLINE_S = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""As launchers set it, ours and torchrun; the loopback is where all of them are."""


class RankFailed(RuntimeError):
    """A process raised (the message is its traceback), died, or did not answer in time."""


class ProcessPool:
    """Processes that are gone when the block is left, whatever happened, with all that they started themselves.

    Args:
        preload: Modules that the fork server imports before it forks the first process.
    """

    def __init__(self, preload: list[str]) -> None:
        self._environment = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        for name, before in self._environment.items():
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    def start(self, function: Callable[..., Any], *arguments: Any) -> Connection:
        """Calls a module's function in a process of its own; what it returns comes over the connection."""
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(os.getpid(), there, function, arguments))
        process.start()
        there.close()
        self._running.append((process, here))
        return here

    def run(self, function: Callable[..., Any], arguments: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls it once for each tuple of arguments, all at the same time; the results in that order."""
        answers = [self.start(function, *some) for some in arguments]
        try:
            return gather(answers)
        finally:
            self.end()

    def one(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run one process, and return its result."""
        return self.run(function, [arguments])[0]

    def end(self) -> None:
        """Ends what still runs."""
        for process, connection in self._running:
            _kill_group(process.pid)
            process.kill()
            process.join()
            connection.close()
        self._running.clear()


def marked_processes(variable: str, value: str) -> list[Process]:
    """Return the processes that have a variable with this value, also those in sessions of their own."""
    return [process for pid, process in read_processes().items() if read_environment(pid).get(variable) == value]


def gather(answers: Sequence[Connection], deadline_s: float = DEADLINE_S) -> list[Any]:
    """All answers. Raises RankFailed as soon as one process failed."""
    results: dict[Connection, Any] = {}
    end = time.monotonic() + deadline_s
    while len(results) < len(answers):
        waiting = [answer for answer in answers if answer not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise RankFailed(f"{len(waiting)} of {len(answers)} processes did not answer within {deadline_s:.0f} s")
        for answer in ready:
            assert isinstance(answer, Connection)
            results[answer] = _receive(answer)
    return [results[answer] for answer in answers]


def _receive(answer: Connection) -> Any:
    try:
        ok, value = answer.recv()
    except EOFError as error:
        raise RankFailed("a process ended without an answer") from error
    if not ok:
        raise RankFailed(value)
    return value


def _answer(bench: int, answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    _end_with(bench)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        outcome = True, function(*arguments)
    except Exception:  # noqa: BLE001 - handed to the bench whole
        outcome = False, traceback.format_exc()
    answer.send(outcome)


def _end_with(bench: int) -> None:
    """Ends this process and what it started with the bench, of which it is no child: the fork server is its parent,
    and lives as long as its children."""
    try:
        descriptor = os.pidfd_open(bench)
    except ProcessLookupError:
        os._exit(1)

    def follow() -> None:
        select.select([descriptor], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, name="follow-bench", daemon=True).start()


def _kill_group(pid: int | None) -> None:
    """Only a group that the process leads itself: before its first line it still belongs to the fork server's."""
    try:
        if pid is not None and os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
