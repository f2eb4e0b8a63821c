"""Send orders to the fork server and receive its events, on the launcher's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from everstep_trainer.launch.forking.fork_messages import (
    ControlChannel,
    Fork,
    FromForkServer,
    Signal,
    StartForkServer,
    make_socket_pair,
)
from everstep_trainer.launch.forking.process_setup import notices_blocked

# ---- wait for a subprocess on the event loop, without a thread


async def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Return the process's status once it is dead and reaped."""
    if process.poll() is None:
        descriptor, ended = os.pidfd_open(process.pid), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return process.wait()


log = logging.getLogger(__name__)

REAP_WAIT_S = 0.5
"""Longest time from a process's end-of-file until the kernel gives its status."""
END_WAIT_S = 5.0
"""Longest time for the fork server to kill its children and exit; it needs milliseconds."""


class ForkServerLost:
    """The fork server ended, with all processes that it forked."""


class ForkServerClient:
    """Starts one fork server and talks to it.

    The fork server is forked from a zygote that has imported torch. The zygote outlives it, so that the next fork
    server starts in milliseconds. ``on_event`` receives the fork server's messages, and ForkServerLost last.
    """

    def __init__(
        self, on_event: Callable[[FromForkServer | ForkServerLost], None], environment: Mapping[str, str]
    ) -> None:
        self._on_event = on_event
        self._environment = environment
        self._zygote: subprocess.Popen[bytes] | None = None
        self._orders: ControlChannel[Any] | None = None
        self._channel: ControlChannel[FromForkServer] | None = None

    def start(self) -> None:
        """Start the server; orders may follow at once and wait until its imports are done."""
        assert self._channel is None, "one server at a time"
        ours, theirs = make_socket_pair()
        with theirs:
            if not self._ask_zygote(theirs):
                self._start_zygote()
                # if that zygote has ended already, no process holds ``theirs``, and the server counts as lost
                self._ask_zygote(theirs)
        self._channel = ControlChannel(ours, FromForkServer)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    def _ask_zygote(self, control: socket.socket) -> bool:
        """Ask the zygote for a fork server with ``control`` as its channel; return False if no zygote is alive."""
        if self._zygote is None or self._orders is None or self._zygote.poll() is not None:
            return False
        try:
            self._orders.send(StartForkServer(), (control.fileno(),))
        except OSError:
            return False
        return True

    def _start_zygote(self) -> None:
        self._end_zygote()
        ours, theirs = make_socket_pair()
        # -P: imports must not find modules in the current directory.
        command = [sys.executable, "-P", "-m", "everstep_trainer.launch.forking.forkserver"]
        command += ["--orders", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs, notices_blocked():
            # In its own session: Ctrl-C in the terminal reaches only the launcher, which ends the children in order.
            fds = [theirs.fileno()]
            self._zygote = subprocess.Popen(command, env=self._environment, pass_fds=fds, start_new_session=True)
        self._orders = ControlChannel(ours, StartForkServer)

    def _end_zygote(self) -> None:
        """Kill the zygote, if there is one, and its fork server with it."""
        zygote, self._zygote = self._zygote, None
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.close()
        if zygote is not None:
            zygote.kill()
            zygote.wait()

    def fork(
        self,
        serial: int,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str | None] | None = None,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Order a child; ``Forked`` follows. The descriptors may be closed afterwards."""
        variables = {name: None if value is None else os.fsencode(value) for name, value in (environment or {}).items()}
        order = Fork(serial=serial, target=target, arguments=dict(arguments), environment=variables)
        self._send(order, descriptors)

    def signal(self, serial: int, number: signal.Signals) -> None:
        """Send a signal to a child; a dead child is ignored."""
        self._send(Signal(serial=serial, number=int(number)))

    def was_killed(self) -> bool:
        """Return whether a signal ended the lost server: it was killed, and did not fail by itself."""
        if self._zygote is None:
            return False
        try:
            return self._zygote.wait(REAP_WAIT_S) < 0
        except subprocess.TimeoutExpired:  # only the server that it forked is gone, which has nothing to import
            return True

    async def end(self) -> None:
        """End the server and all its children; return when it is gone."""
        self._forget_channel()
        if self._zygote is None:
            return
        self._zygote.terminate()  # during its imports it would not read its orders
        try:
            async with asyncio.timeout(END_WAIT_S):
                await wait_for_exit(self._zygote)
        except TimeoutError:
            log.warning("the fork server did not end within %s s; killing it", END_WAIT_S)
        finally:
            self._end_zygote()

    def _send(self, message: Fork | Signal, descriptors: tuple[int, ...] = ()) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # finds the end-of-file and reports ForkServerLost

    def _receive(self) -> None:
        while self._channel is not None:
            try:
                received = self._channel.receive(wait=False)
            except BlockingIOError:
                return
            if received is None:
                self._forget_channel()
                self._on_event(ForkServerLost())
                return
            self._on_event(received[0])

    def _forget_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
