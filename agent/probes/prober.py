"""The supervisor's side of probing: one warm probe process, one probe at a time, always an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys

from agent.probes.frames import MAX_FRAME_BYTES, Ask, FromChild, Stage
from everstep.clock import Clock
from everstep.errors import MalformedMessage
from everstep.framing import FrameDecoder, encode_frame
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
REAP_WAIT_S = 10.0


class ProbeChild:
    """A running probe process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agent.probes.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"},  # what failed is in the answer
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._decoder: FrameDecoder[FromChild] = FrameDecoder(FromChild, MAX_FRAME_BYTES)
        self.doing = "loading torch"
        self.began = False
        self._hung_up = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, ask: Ask) -> ProbeFinished | None:
        """The answer, or None where the process ended without one. Raises OSError, MalformedMessage.

        ``doing`` says what it was at, ``began`` whether it had come to the probe itself.
        """
        self.began = False
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, encode_frame(ask))
        while data := await loop.sock_recv(self._channel, READ_BYTES):
            for message in self._decoder.feed(data):
                if isinstance(message, Stage):
                    self.doing, self.began = message.doing, True
                else:
                    return message
        self._hung_up = True
        return None

    async def end(self) -> str:
        """Kills it and says how it ended."""
        self._channel.close()
        if self._hung_up:  # it died: a moment later it can be reaped
            await self._reaped()
        killed = self.alive
        if killed:
            self._process.kill()
        await self._reaped()
        return "killed" if killed else f"exit status {self._process.returncode}"

    async def _reaped(self) -> None:
        """In a thread, which goes on when this is cancelled: a killed process is always reaped."""
        try:
            await asyncio.to_thread(self._process.wait, REAP_WAIT_S)
        except subprocess.TimeoutExpired:
            return


class Prober:
    """Runs probes in a process that has torch loaded; starts it at the first one.

    Args:
        clock: for deadlines.
        idle_s: a process that nobody has asked anything for so long is ended; torch holds some 200 MB.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, idle_s: float = 900.0) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._child: ProbeChild | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[tuple[ProbeChild | None, str]] | None = None

    @property
    def pid(self) -> int | None:
        """The warm probe process, if there is one."""
        return None if self._child is None else self._child.pid

    async def run(self, probe: RunProbe, node: str) -> ProbeFinished:
        """Takes part in ``probe`` as ``node``. Whatever goes wrong is an answer that is not ok, never an exception.

        The answer comes within ``probe.timeout_s``, the loading of torch included.
        """
        deadline = self._clock.monotonic() + probe.timeout_s
        if node not in probe.nodes:
            return _failed(probe, f"{node} is not among the nodes of this probe")
        try:
            async with asyncio.timeout(probe.timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            return _failed(probe, f"no result within {probe.timeout_s:g} s: an earlier probe went on for so long")
        try:
            finished = await self._ask(Ask(probe=probe, node=node, deadline=deadline))
        finally:
            self._turn.release()
        if not finished.ok:
            logger.warning("probe %s failed: %s", probe.probe, finished.detail, extra={"node": node})
        return finished

    async def close(self) -> None:
        """Ends the probe process."""
        if self._idle is not None:
            self._idle.cancel()
        await self._drop()

    async def _ask(self, ask: Ask) -> ProbeFinished:
        if self._idle is not None:
            self._idle.cancel()
        finished, why, late = None, "", False
        try:
            child = self._child = await self._warm()
            async with asyncio.timeout(ask.deadline - self._clock.monotonic()):
                finished = await child.ask(ask)
        except TimeoutError:
            why, late = f"no result within {ask.probe.timeout_s:g} s", True
        except (OSError, MalformedMessage) as error:
            why = f"the probe process broke: {error}"
        finally:
            # Cancelled, late or broken: such a process is in no state to be asked again.
            gone, how = (None, "") if finished is not None else await self._drop()
        if finished is None:
            at = "" if gone is None else f" at: {gone.doing}"
            began = late and gone is not None and gone.began  # a process that breaks says nothing of the nodes
            return _failed(ask.probe, f"{why or f'the probe process ended ({how})'}{at}", began=began)
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._rest)
        return finished

    async def _warm(self) -> ProbeChild:
        if self._child is not None and not self._child.alive:
            await self._drop()
        return self._child or ProbeChild()

    async def _drop(self) -> tuple[ProbeChild | None, str]:
        child, self._child = self._child, None
        return child, "" if child is None else await child.end()

    def _rest(self) -> None:
        if not self._turn.locked():
            self._ending = asyncio.get_running_loop().create_task(self._drop())


def _failed(probe: RunProbe, detail: str, *, began: bool = False) -> ProbeFinished:
    return ProbeFinished(probe=probe.probe, ok=False, detail=detail[:2000], began=began)
