"""The launcher's side of the fork server: orders out, births and deaths in, on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_hooks.launch.channel import Channel, pair
from trainer_hooks.launch.deaths import death
from trainer_hooks.launch.messages import Fork, FromForkServer, Signal

log = logging.getLogger(__name__)

END_WAIT_S = 5.0
"""How long the fork server may take to kill its children and go; it needs milliseconds."""


class Lost:
    """The fork server is gone, and all it forked with it."""


class ForkServerLink:
    """Starts one fork server and speaks to it. ``heard`` gets what it says, ``Lost`` last.

    Args:
        environment: the server's, and thereby its children's, environment.
        modules: what it imports; None for the default list.
    """

    def __init__(
        self,
        heard: Callable[[FromForkServer | Lost], None],
        environment: Mapping[str, str],
        modules: Sequence[str] | None = None,
    ) -> None:
        self._heard = heard
        self._environment = dict(environment)
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[FromForkServer] | None = None

    @property
    def pid(self) -> int | None:
        """The fork server's process, None where there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the server; orders may follow at once and wait until it has imported what it should."""
        assert self._channel is None, "one server at a time"
        ours, theirs = pair()
        # -P: what is imported here must not be found in the current directory, whatever lies there.
        command = [sys.executable, "-P", "-m", "trainer_hooks.launch.forkserver"]
        command += ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
        if self._modules is not None:
            command += ["--preload", *self._modules]
        with theirs:
            # A session of its own: Ctrl-C in the terminal is for the launcher, which ends the children in order.
            self._process = subprocess.Popen(
                command, env=self._environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._channel = Channel(ours, FromForkServer)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    def fork(
        self,
        serial: int,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str | None] | None = None,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Orders a child; ``Forked`` follows. The descriptors may be closed afterwards."""
        order = Fork(serial=serial, target=target, arguments=dict(arguments), environment=dict(environment or {}))
        self._send(order, descriptors)

    def signal(self, serial: int, number: signal.Signals) -> None:
        """Sends a signal to a child; nothing happens where it is dead already."""
        self._send(Signal(serial=serial, number=int(number)))

    async def end(self) -> None:
        """Ends the server and whatever it still has; returns when it is gone."""
        self._forget_channel()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()  # while it still imports it would not look at the channel
        try:
            async with asyncio.timeout(END_WAIT_S):
                await death(process)
        except TimeoutError:
            log.warning("the fork server did not end within %s s; killing it", END_WAIT_S)
            process.kill()
        finally:
            process.wait()

    def _send(self, message: Fork | Signal, descriptors: tuple[int, ...] = ()) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # finds the end-of-file and says Lost

    def _receive(self) -> None:
        while self._channel is not None:
            try:
                received = self._channel.receive(wait=False)
            except BlockingIOError:
                return
            if received is None:
                self._lose()
                return
            self._heard(received[0])

    def _lose(self) -> None:
        self._forget_channel()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._heard(Lost())

    def _forget_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
