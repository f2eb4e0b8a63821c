"""Processes for multi-process tests, forked in tens of milliseconds from a server that has torch imported.

A test asks for the session's pool by the fixture ``forks`` (tests/conftest.py) and gives it module-level functions::

    def add(a: int, b: int) -> int: ...

    def test_ranks_add(forks: ForkPool) -> None:
        ranks = [forks.start(add, rank, 1) for rank in range(4)]
        assert [rank.result() for rank in ranks] == [1, 2, 3, 4]

The server is the launcher's fork server, so its children are killed when the test process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everstep_trainer.launch.forking.fork_messages import (
    ControlChannel,
    Exited,
    Fork,
    Forked,
    ForkServerReady,
    FromForkServer,
    Signal,
    StartForkServer,
    make_socket_pair,
)
from everstep_trainer.launch.forking.forkserver import PRELOAD_MODULES
from tests.support.processes import kill_points

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0
LONGEST_COMMAND = 16_384
"""Bytes by which the command line and the environment of a forked program may exceed those of the fork server.

See ``forked_programs.set_command_line``.
"""
PADDING = "EVERSTEP_TEST_PADDING"
"""An environment variable that makes the environment of the fork server longer."""


class ChildFailed(AssertionError):
    """The function raised in the child, with its traceback as the message, or the child died without an answer."""


class ForkedChild:
    """A function that runs in a process of its own."""

    def __init__(self, pool: ForkPool, serial: int, answer: int) -> None:
        self._pool = pool
        self._serial = serial
        self._answer = answer
        self._outcome: tuple[bool, Any] | None = None

    @property
    def pid(self) -> int:
        return self._pool.pid(self._serial)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. SIGKILL goes to the whole process group."""
        self._pool.order(Signal(serial=self._serial, number=number))

    def ended(self) -> Exited | None:
        """Return how the process ended, or None while it runs."""
        return self._pool.ended(self._serial)

    def kill(self) -> Exited:
        """Kill the process, and return how it ended."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> Exited:
        """Wait for the process's end, and return how it ended."""
        return self._pool.end_of(self._serial, timeout_s)

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """Wait for the function's return value. Raises ChildFailed."""
        if self._outcome is None:
            self._outcome = self._read(timeout_s)
        ok, value = self._outcome
        if not ok:
            raise ChildFailed(value)
        return value

    def close(self) -> None:
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1

    def _read(self, timeout_s: float) -> tuple[bool, Any]:
        deadline = time.perf_counter() + timeout_s
        body = b""
        while True:
            readable, _, _ = select.select([self._answer], [], [], max(0.0, deadline - time.perf_counter()))
            if not readable:
                raise ChildFailed(f"no answer from process {self.pid} within {timeout_s} s")
            data = os.read(self._answer, 1 << 16)
            if not data:
                break
            body += data
        if not body:
            end = self.wait()
            return False, f"process {end.pid} ended with code {end.code}, signal {end.signal}, and no answer"
        outcome: tuple[bool, Any] = pickle.loads(body)
        return outcome


def server_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a fork server."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", PADDING: "." * LONGEST_COMMAND, **changes}
    environment.pop(kill_points.FOLDER, None)  # a server that outlives the test must not pass the test's kill points
    return environment


def start_server(
    orders: socket.socket, names: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a fork server, with room for the command lines of forked programs."""
    command = [sys.executable, "-m", "everstep_trainer.launch.forking.forkserver"]
    command += ["--orders", str(orders.fileno()), "--parent", str(os.getpid())]
    command += ["--preload", *names, *[name for name in names[:1] for _ in range(LONGEST_COMMAND // 10)]]
    return subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[orders.fileno()])


class ForkPool:
    """A fork server for tests. Not thread-safe."""

    def __init__(self, modules: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        names = tuple(PRELOAD_MODULES if modules is None else modules)
        self._inherited = server_environment(environment or {})
        orders, theirs = make_socket_pair()
        with theirs:
            self._server = start_server(theirs, names, self._inherited)
        self._orders: ControlChannel[StartForkServer] = ControlChannel(orders, StartForkServer)
        self._channel = self._order_server()
        self._serial = 0
        self._pids: dict[int, int] = {}
        self._ends: dict[int, Exited] = {}
        self._children: list[ForkedChild] = []

    def start(
        self, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str | None] | None = None
    ) -> ForkedChild:
        """Call ``function(*arguments)`` in a new process. Function and arguments must be picklable."""
        self._serial += 1
        reading, writing = os.pipe2(os.O_CLOEXEC)
        call = {
            "path": sys.path,
            "function": f"{function.__module__}:{function.__qualname__}",
            "arguments": pickle.dumps(arguments),
        }
        fork = Fork(
            serial=self._serial,
            target="tests.support.processes.fork_pool:run_child",
            arguments=call,
            environment={n: None if value is None else os.fsencode(value) for n, value in (environment or {}).items()},
        )
        self._channel.send(fork, (writing,))
        os.close(writing)
        child = ForkedChild(self, self._serial, reading)
        self._children.append(child)
        return child

    def _order_server(self) -> ControlChannel[FromForkServer]:
        ours, control = make_socket_pair()
        with control:
            self._orders.send(StartForkServer(), (control.fileno(),))
        return ControlChannel(ours, FromForkServer)

    def restart_server(self) -> None:
        """Let the zygote fork another fork server. The children of the earlier server are killed."""
        self._channel.close()
        for child in self._children:
            child.close()
        self._children.clear()
        self._channel = self._order_server()

    def environment_changes(self, wanted: Mapping[str, str] = os.environ) -> dict[str, str | None]:
        """Return what ``start`` has to change to give a child the wanted environment, by default that of the test."""
        names = self._inherited.keys() | wanted.keys()
        return {name: wanted.get(name) for name in names if wanted.get(name) != self._inherited.get(name)}

    def order(self, message: Signal) -> None:
        self._channel.send(message)

    def pid(self, serial: int) -> int:
        self._receive_until(lambda: serial in self._pids, DEADLINE_S)
        return self._pids[serial]

    def end_of(self, serial: int, timeout_s: float) -> Exited:
        self._receive_until(lambda: serial in self._ends, timeout_s)
        return self._ends[serial]

    def ended(self, serial: int) -> Exited | None:
        while serial not in self._ends and select.select([self._channel], [], [], 0)[0]:
            self._receive()
        return self._ends.get(serial)

    def close(self) -> None:
        """Kill all running children."""
        self._channel.close()
        self._orders.close()
        self._server.wait(DEADLINE_S)
        for child in self._children:
            child.close()

    def release(self) -> None:
        """Kill and forget every child between tests."""
        for child in self._children:
            child.kill()
            child.close()
        self._children.clear()

    def _receive_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while not condition():
            readable, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.perf_counter()))
            if not readable:
                raise ChildFailed(f"the fork server did not answer within {timeout_s} s")
            self._receive()

    def _receive(self) -> None:
        received = self._channel.receive()
        assert received is not None, "the fork server is gone"
        self._note(received[0])

    def _note(self, message: FromForkServer) -> None:
        match message:
            case Forked():
                self._pids[message.serial] = message.pid
            case Exited():
                self._ends[message.serial] = message
            case ForkServerReady():
                pass


def run_child(descriptors: tuple[int, ...], *, path: list[str], function: str, arguments: bytes) -> None:
    """Call the function in the child, and send its return value or its error."""
    (answer,) = descriptors
    sys.path[:] = path
    module, _, name = function.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        outcome: tuple[bool, Any] = (True, target(*pickle.loads(arguments)))
    except SystemExit as end:
        exit_child(end.code)
    except Exception:  # noqa: BLE001 - reported to the test
        outcome = (False, traceback.format_exc())
    with os.fdopen(answer, "wb") as file:
        pickle.dump(outcome, file)
    exit_child(0)


def exit_child(code: object) -> NoReturn:
    """End the child as ``multiprocessing`` does: threads are joined, and exit handlers run.

    The interpreter is not finalized. With torch that would copy every page shared with the server, for 0.35 s of CPU.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def torchrun(forks: ForkPool, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the function in ``world`` processes with torchrun's environment, and return the results."""
    from torch._C._distributed_c10d import TCPStore  # most tests that fork need no torch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        forks.start(function, *arguments, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    return [rank.result() for rank in ranks]


@functools.cache
def torch_forks() -> ForkPool:
    """Return the session's fork server with torch and every program imported. It ends with this process."""
    pool = ForkPool(torch_fork_modules())
    atexit.register(pool.close)
    return pool


def torch_fork_modules() -> tuple[str, ...]:
    """Return the modules that the session's fork server imports."""
    from tests.support.processes import forked_programs

    return (*PRELOAD_MODULES, *forked_programs.MODULES, *forked_programs.NODE_MODULES)


@contextlib.contextmanager
def fork_pool(modules: Sequence[str] | None = None) -> Iterator[ForkPool]:
    """Yield a pool that kills its children at the end of the block."""
    pool = ForkPool(modules)
    try:
        yield pool
    finally:
        pool.close()
