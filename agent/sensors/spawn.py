"""One life of the sensor process, held from outside: started, listened to, explained, killed."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys

from agent.sensors.frames import DOING_BYTES, MAX_POLL_BYTES, Begin, Poll
from everstep.framing import FrameDecoder, encode_frame

KILL_WAIT_S = 1.0
"""How long a killed process may take to vanish before it is left to the kernel: it sits in a driver call."""

REAP_CHECK_S = 0.01
READ_BYTES = 1 << 16


class SensorChild:
    """A running sensor process. Start it from the main thread: it follows that thread's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        page = os.memfd_create("everstep-sensors", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, DOING_BYTES)
            self._page = mmap.mmap(page, DOING_BYTES, prot=mmap.PROT_READ)
            arguments = [str(theirs.fileno()), str(page), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agent.sensors.child", *arguments],
                pass_fds=(theirs.fileno(), page),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)
        ours.setblocking(False)
        self._channel = ours
        self._decoder: FrameDecoder[Poll] = FrameDecoder(Poll, MAX_POLL_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def doing(self) -> str:
        """What it said last that it would touch."""
        return bytes(self._page[:DOING_BYTES]).rstrip(b"\0").decode("utf-8", "replace") or "start"

    async def begin(self, begin: Begin) -> None:
        """Tells it how to sense. Raises OSError where it is gone."""
        await asyncio.get_running_loop().sock_sendall(self._channel, encode_frame(begin))

    async def receive(self, deadline: float) -> list[Poll] | None:
        """The next messages, or None at the end of the process.

        Raises TimeoutError when none came until ``deadline`` (the event loop's time), and MalformedMessage.
        """
        try:
            async with asyncio.timeout_at(deadline):
                data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
        except TimeoutError:
            # We may be the ones who were late: what has arrived meanwhile speaks for the process.
            data = self._arrived()
        return self._decoder.feed(data) if data else None

    def _arrived(self) -> bytes:
        try:
            return self._channel.recv(READ_BYTES)
        except BlockingIOError:
            raise TimeoutError from None

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    async def end(self) -> str:
        """Kills it, waits a moment for it to vanish, and says how it ended. May be called again."""
        self._channel.close()
        killed = not self.gone
        if killed:
            self._process.kill()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KILL_WAIT_S
        while not self.gone and loop.time() < deadline:
            await asyncio.sleep(REAP_CHECK_S)
        self._page.close()
        if not self.gone:
            return f"pid {self.pid} does not die: it is held in the kernel"
        return "killed" if killed else f"exit status {self._process.returncode}"
