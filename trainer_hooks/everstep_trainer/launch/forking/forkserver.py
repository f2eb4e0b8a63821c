"""Fork workers in milliseconds from a process that has imported torch: the zygote and its fork server.

The zygote imports torch once, and then forks a fork server, which shares its memory, for each ``StartForkServer`` from
the launcher. A dead fork server is therefore replaced in milliseconds, without another import. If the zygote dies, the
kernel kills its fork server.

Launcher and fork server exchange ``fork_messages`` over a socket pair. The fork server reports a child's death at once.
When the launcher is gone it kills its children, waits for their end and exits. If the fork server itself dies, the
kernel kills its children.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from everstep.host.parent_process import die_with_parent
from everstep_trainer.launch.forking.fork_messages import (
    ControlChannel,
    Exited,
    Fork,
    Forked,
    ForkServerReady,
    Signal,
    StartForkServer,
    ToForkServer,
)
from everstep_trainer.launch.forking.process_setup import reset_signals, set_process_name, signal_group

# ---- preload: imports of the zygote, shared by fork servers and workers
#
# Ordinary training code imports these modules lazily, at its first step or its first failure, which costs a fresh
# replacement seconds. Importing them together takes about 1.5 s and 310 MB once. A child forked afterwards shares the
# pages and starts in 5 to 10 ms.

PRELOAD_VARIABLE = "EVERSTEP_PRELOAD"
"""The environment variable with the modules of ``--preload``, separated by commas."""
PRELOAD_MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",  # DistributedDataParallel imports it
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.optim",
    "torch._dynamo",  # the first optimizer.step() imports it: 0.3 to 2 s
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.profiler._cupti_monitor",  # the first backward imports it
    "encodings.idna",  # the first look-up of a host's name imports it: 2 ms
    "xxhash",
    "everstep_trainer.entry_point",  # everstep.main and its imports
)


def preload(modules: Iterable[str]) -> None:
    """Import ``modules`` and hide all objects so far from the garbage collector.

    Frozen objects are never walked, so a collection in a child does not touch (and thereby copy) the shared pages. A
    missing module of an installed package is skipped, since modules differ between versions; a missing package raises
    ImportError. Asserts that CUDA stays uninitialized: a CUDA context does not survive a fork.
    """
    gc.disable()
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            package = name.partition(".")[0]
            if missing.name is None or missing.name == package or not name.startswith(missing.name):
                raise
    cuda = sys.modules.get("torch.cuda")
    assert cuda is None or not cuda.is_initialized(), "an import initialized CUDA; forked workers could not use it"
    gc.freeze()  # with the imports' garbage, 2 % of all: collecting it takes 0.3 s and returns no page


def preload_requested() -> None:
    """Import the modules of ``--preload``, so that ranks and standbys share them. Call it before ``preload``.

    Raises SystemExit if a module cannot be imported, starts a Python thread or initializes CUDA: neither a thread nor a
    CUDA context survives a fork.
    """
    for name in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")):
        threads = threading.active_count()
        try:
            importlib.import_module(name)
        except Exception as error:
            raise SystemExit(f"everstep-launch: --preload {name}: it cannot be imported here: {error!r}") from error
        cuda = sys.modules.get("torch.cuda")
        if threading.active_count() > threads:
            raise SystemExit(f"everstep-launch: --preload {name}: it starts threads, which forks lack; leave it out")
        if cuda is not None and cuda.is_initialized():
            raise SystemExit(f"everstep-launch: --preload {name}: it initializes CUDA before the fork; leave it out")


def run_child(order: Fork, descriptors: tuple[int, ...]) -> None:
    """Call an order's target with the child's environment and descriptors; its exceptions end the process."""
    for name, value in order.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = os.fsdecode(value)
    module, _, function = order.target.partition(":")
    target: Callable[..., Any] = getattr(importlib.import_module(module), function)
    target(descriptors, **order.arguments)


class Zygote:
    """Holds the imports, and forks one fork server after another."""

    def __init__(self, orders: ControlChannel[StartForkServer]) -> None:
        self._orders = orders
        self._server = 0
        """The fork server's pid; 0 once it is reaped."""

    def serve(self) -> ControlChannel[ToForkServer]:
        """Wait for orders. Returns only in a forked fork server, with its channel to the launcher."""
        signal.signal(signal.SIGCHLD, self._reap)
        signal.signal(signal.SIGTERM, self._end)
        while True:
            received = self._orders.receive()
            if received is None:
                self._end()
            _, (control,) = received
            self._kill_server()
            channel = self._fork(control)
            if channel is not None:
                return channel

    def _fork(self, control: int) -> ControlChannel[ToForkServer] | None:
        zygote = os.getpid()
        # Signals stay blocked until the process knows its role: a handler must not run in the child, or before the pid
        # is noted.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            die_with_parent(zygote, signal.SIGKILL)
            set_process_name("everstep-forks")
            self._orders.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return ControlChannel(socket.socket(fileno=control), ToForkServer)
        self._server = pid
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(control)
        return None

    def _reap(self, *_: object) -> None:
        if self._server and os.waitpid(self._server, os.WNOHANG)[0]:
            self._server = 0

    def _kill_server(self) -> None:
        """Make sure that the previous fork server is dead: its children must not meet those of the next one."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM))
        if self._server:
            os.kill(self._server, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            os.waitpid(self._server, 0)
            self._server = 0
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end(self, *_: object) -> NoReturn:
        """Let the fork server end in order, which kills its children, and then exit."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        if self._server:
            os.kill(self._server, signal.SIGTERM)
            os.kill(self._server, signal.SIGCONT)  # a stopped process would not handle SIGTERM
            os.waitpid(self._server, 0)
        os._exit(0)


class ForkServer:
    """Executes the launcher's orders and reports the children's deaths."""

    def __init__(self, control: ControlChannel[ToForkServer]) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)

    def serve(self) -> tuple[Fork, tuple[int, ...]]:
        """Serve until the launcher is gone. Returns only in a forked child, with its order and descriptors."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        while True:
            channels: list[ControlChannel[ToForkServer] | socket.socket] = [self._control, self._woken]
            ready, _, _ = select.select(channels, [], [])
            if self._woken in ready:
                self._woken.recv(4096)
            self._reap()
            if self._control in ready:
                received = self._control.receive()
                if received is None:
                    self._end()
                order, descriptors = received
                if isinstance(order, Signal):
                    self._signal(order)
                elif self._fork(order, descriptors):
                    return order, descriptors

    def _fork(self, order: Fork, descriptors: tuple[int, ...]) -> bool:
        """Fork a child; return whether this is it."""
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals stay blocked until the child has its own handlers: it must never run the server's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self._detach_child(server)
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._children[order.serial] = pid
        for descriptor in descriptors:
            os.close(descriptor)
        self._send(Forked(serial=order.serial, pid=pid))
        return False

    def _detach_child(self, server: int) -> None:
        """Give the child its own session, bind it to the server's life, and drop the server's sockets and handlers."""
        die_with_parent(server, signal.SIGKILL)
        os.setsid()
        reset_signals()
        for opened in (self._control, self._wake, self._woken):
            opened.close()
        gc.enable()
        numpy = sys.modules.get("numpy")
        if numpy is not None:  # seeded once, at import; ``random`` reseeds itself
            numpy.random.seed()

    def _signal(self, order: Signal) -> None:
        pid = self._children.get(order.serial)
        if pid is None:
            return
        os.kill(pid, order.number)  # not reaped yet, so the pid is still its own
        if order.number == signal.SIGKILL:
            signal_group(pid, order.number)

    def _reap(self) -> None:
        serials = {pid: serial for serial, pid in self._children.items()}
        while self._children:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            exited = dead.si_code == os.CLD_EXITED
            if not (exited and dead.si_status == 0):
                # Kill data loader workers and the like; the zombie keeps the group's number from being used again.
                signal_group(dead.si_pid, signal.SIGKILL)
            os.waitpid(dead.si_pid, 0)
            serial = serials[dead.si_pid]
            del self._children[serial]
            code, number = (dead.si_status, None) if exited else (None, dead.si_status)
            self._send(Exited(serial=serial, pid=dead.si_pid, code=code, signal=number))

    def _send(self, message: Forked | Exited) -> None:
        try:
            self._control.send(message)
        except OSError:
            self._end()

    def _end(self, *_: object) -> NoReturn:
        """Kill all children and exit when they are gone: processes that wait for this one rely on that."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self._children.values():
            with contextlib.suppress(ProcessLookupError):  # a signal came between reaping the child and forgetting it
                os.kill(pid, signal.SIGKILL)
            signal_group(pid, signal.SIGKILL)
        for pid in self._children.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)


def main() -> None:
    """Run the zygote; returns only in children, when their target has returned."""
    parser = argparse.ArgumentParser(prog="everstep-forkserver")
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", nargs="*", default=list(PRELOAD_MODULES))
    options = parser.parse_args()
    die_with_parent(options.parent)
    set_process_name("everstep-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Python 3.12 also counts numpy's BLAS threads, which handle forks themselves (pthread_atfork).
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    preload_requested()
    preload(options.preload)
    control = Zygote(ControlChannel(socket.socket(fileno=options.orders), StartForkServer)).serve()
    control.send(ForkServerReady())
    run_child(*ForkServer(control).serve())


if __name__ == "__main__":
    main()
