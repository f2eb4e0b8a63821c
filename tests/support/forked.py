"""Processes for multi-process tests, forked from a server that has torch imported: ranks in tens of milliseconds.

A test asks for the session's pool by the fixture ``forks`` (tests/conftest.py) and gives it module-level functions::

    def add(a: int, b: int) -> int: ...

    def test_ranks_add(forks: ForkPool) -> None:
        ranks = [forks.start(add, rank, 1) for rank in range(4)]
        assert [rank.result() for rank in ranks] == [1, 2, 3, 4]

It is the launcher's own fork server, so children die with the test process whatever happens to it.
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

from tests.support import dying

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LONGEST_COMMAND = 16_384
"""Bytes that the command line and the environment of a forked program may have more than the fork server's own
(``programs.show_command``)."""
ROOM = "EVERSTEP_TEST_ROOM"
"""The fork server's environment variable that only makes its environment longer."""


class ChildFailed(AssertionError):
    """The function raised in the child (the message is its traceback), or the child died without an answer."""


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
        """Sends a signal; SIGKILL goes to the whole process group."""
        self._pool.order(Signal(serial=self._serial, number=number))

    def ended(self) -> Exited | None:
        """How the process ended, once it has."""
        return self._pool.ended(self._serial)

    def kill(self) -> Exited:
        """SIGKILL, and the end."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> Exited:
        """How the process ended."""
        return self._pool.end_of(self._serial, timeout_s)

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """What the function returned. Raises ChildFailed."""
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", ROOM: "." * LONGEST_COMMAND, **changes}
    environment.pop(dying.FOLDER, None)  # a server that outlives the test must not pass its points of death
    return environment


def start_server(
    module: str, orders: socket.socket, names: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program with the arguments of a fork server's."""
    command = [sys.executable, "-m", module, "--orders", str(orders.fileno()), "--parent", str(os.getpid())]
    command += ["--preload", *names, *names[:1] * (LONGEST_COMMAND // 10)]  # room for those of what is forked
    return subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[orders.fileno()])


class SharedImports:
    """A process with imports (tests/support/zygotes.py), for the pools of all workers that are forked after this."""

    def __init__(self, names: Sequence[str]) -> None:
        self.environment = server_environment({})
        orders, theirs = make_socket_pair()
        with theirs:
            self._process = start_server("tests.support.zygotes", theirs, names, self.environment)
        self._orders: ControlChannel[StartForkServer] = ControlChannel(orders, StartForkServer)

    def start_zygote(self, orders: socket.socket) -> None:
        """Have a zygote that gets its orders there, and says what it has to say where this process does."""
        self._orders.send(StartForkServer(), (orders.fileno(), 1, 2))

    def close(self) -> None:
        self._orders.close()
        self._process.wait(DEADLINE_S)


_shared: dict[tuple[str, ...], SharedImports] = {}


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """Import what the pools of a session's workers need once for all of them."""
    from tests.support import programs

    for names in (of_torch_forks(), programs.MODULES):
        _shared[names] = SharedImports(names)
    try:
        yield
    finally:
        for shared in _shared.values():
            shared.close()
        _shared.clear()


class ForkPool:
    """A fork server for tests. Not thread-safe."""

    def __init__(self, modules: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        names = tuple(PRELOAD_MODULES if modules is None else modules)
        shared = None if environment else _shared.get(names)
        orders, theirs = make_socket_pair()
        self._server: subprocess.Popen[bytes] | None = None
        with theirs:
            if shared is not None:
                self._inherited = shared.environment
                shared.start_zygote(theirs)
            else:
                self._inherited = server_environment(environment or {})
                module = "everstep_trainer.launch.forking.forkserver"
                self._server = start_server(module, theirs, names, self._inherited)
        self._orders: ControlChannel[StartForkServer] = ControlChannel(orders, StartForkServer)
        self._channel = self._order_server()
        self._serial = 0
        self._pids: dict[int, int] = {}
        self._ends: dict[int, Exited] = {}
        self._children: list[ForkedChild] = []

    def start(
        self, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str | None] | None = None
    ) -> ForkedChild:
        """Calls ``function(*arguments)`` in a new process; both must be picklable by reference and by value."""
        self._serial += 1
        reading, writing = os.pipe2(os.O_CLOEXEC)
        call = {
            "path": sys.path,
            "function": f"{function.__module__}:{function.__qualname__}",
            "arguments": pickle.dumps(arguments),
        }
        fork = Fork(
            serial=self._serial,
            target="tests.support.forked:run_child",
            arguments=call,
            environment=dict(environment or {}),
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

    def serve_anew(self) -> None:
        """Have the zygote fork another fork server. What the one before had forked is dead, or will be."""
        self._channel.close()
        for child in self._children:
            child.close()
        self._children.clear()
        self._channel = self._order_server()

    def changed_environment(self, wanted: Mapping[str, str] = os.environ) -> dict[str, str | None]:
        """For ``start``: what makes the child's environment the wanted one; by default the test's as it is now."""
        names = self._inherited.keys() | wanted.keys()
        return {name: wanted.get(name) for name in names if wanted.get(name) != self._inherited.get(name)}

    def order(self, message: Signal) -> None:
        self._channel.send(message)

    def pid(self, serial: int) -> int:
        self._hear_until(lambda: serial in self._pids, DEADLINE_S)
        return self._pids[serial]

    def end_of(self, serial: int, timeout_s: float) -> Exited:
        self._hear_until(lambda: serial in self._ends, timeout_s)
        return self._ends[serial]

    def ended(self, serial: int) -> Exited | None:
        while serial not in self._ends and select.select([self._channel], [], [], 0)[0]:
            self._hear()
        return self._ends.get(serial)

    def close(self) -> None:
        """Kills what still runs."""
        self._channel.close()
        self._orders.close()
        if self._server is not None:
            self._server.wait(DEADLINE_S)
        for child in self._children:
            child.close()

    def release(self) -> None:
        """Kills and forgets every child; between tests."""
        for child in self._children:
            child.kill()
            child.close()
        self._children.clear()

    def _hear_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while not condition():
            readable, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.perf_counter()))
            if not readable:
                raise ChildFailed(f"the fork server did not answer within {timeout_s} s")
            self._hear()

    def _hear(self) -> None:
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
    """In the child: calls the function and answers with what it returned or raised."""
    (answer,) = descriptors
    sys.path[:] = path
    module, _, name = function.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        outcome: tuple[bool, Any] = (True, target(*pickle.loads(arguments)))
    except SystemExit as end:
        leave(end.code)
    except Exception:  # noqa: BLE001 - handed to the test whole
        outcome = (False, traceback.format_exc())
    with os.fdopen(answer, "wb") as file:
        pickle.dump(outcome, file)
    leave(0)


def leave(code: object) -> NoReturn:
    """Ends the child as ``multiprocessing`` ends one that it forked: threads and exit handlers have their turn, but
    torch is not taken apart, which would copy every page shared with the server and take 0.35 s of CPU."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def torchrun(forks: ForkPool, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the function in as many processes, each with what torchrun sets for its rank; what they return."""
    from torch.distributed import TCPStore  # most tests that fork need no torch

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
    """The session's one fork server with torch and every program imported; it ends with this process."""
    pool = ForkPool(of_torch_forks())
    atexit.register(pool.close)
    return pool


def of_torch_forks() -> tuple[str, ...]:
    from tests.support import programs

    return (*PRELOAD_MODULES, *programs.MODULES, *programs.OF_NODES)


@contextlib.contextmanager
def fork_pool(modules: Sequence[str] | None = None) -> Iterator[ForkPool]:
    """A pool that kills its children at the end of the block."""
    pool = ForkPool(modules)
    try:
        yield pool
    finally:
        pool.close()
