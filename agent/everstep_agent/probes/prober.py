"""The supervisor's side of probing: one warm probe process, one probe at a time, always an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque

from everstep.clock import Clock
from everstep.errors import MalformedMessage
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from everstep_agent.probes.probe_messages import MAX_FRAME_BYTES, Ask, FromChild, Ready, Stage

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
REAP_WAIT_S = 10.0


class ProbeChild:
    """A running probe process. Made inside an event loop, by whose time ``load_by`` is: later it must have torch."""

    def __init__(self, load_by: float) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "everstep_agent.probes.child", str(theirs.fileno()), str(os.getpid())],
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
        self._heard: deque[FromChild] = deque()
        self.doing = "loading torch"
        self.began = False
        self._hung_up = False
        self._load_by = load_by
        self._loading = asyncio.get_running_loop().create_task(self._load())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_loading(self) -> bool:
        """Whether torch is being loaded still, and may be."""
        return not self._loading.done() and asyncio.get_running_loop().time() < self._load_by

    async def loaded(self) -> bool:
        """Waits until torch is loaded; False where the process ended before. Whoever stops waiting does not stop the
        loading. Raises OSError, MalformedMessage."""
        return await asyncio.shield(self._loading)

    async def _load(self) -> bool:
        return isinstance(await self._hear(), Ready)

    async def ask(self, ask: Ask) -> ProbeFinished | None:
        """The answer, or None where the process ended without one. Raises OSError, MalformedMessage.

        ``doing`` says what it was at, ``began`` whether it had come to the probe itself.
        """
        self.doing, self.began = "beginning", False
        await asyncio.get_running_loop().sock_sendall(self._channel, encode_frame(ask))
        while (message := await self._hear()) is not None:
            if isinstance(message, Stage):
                self.doing, self.began = message.doing, True
            elif isinstance(message, ProbeFinished):
                return message
        return None

    async def _hear(self) -> FromChild | None:
        """What it says next; None once it has hung up."""
        while not self._heard:
            data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
            if not data:
                self._hung_up = True
                return None
            self._heard.extend(self._decoder.feed(data))
        return self._heard.popleft()

    async def end(self) -> str:
        """Kills it and says how it ended."""
        try:
            if self._hung_up:  # it died: a moment later it can be reaped
                await self._reaped()
            killed = self.alive
            if killed:
                self._process.kill()
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        finally:
            self._channel.close()
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
        load_s: how long it may load torch, from a file system that is slow or on a node that is busy. A probe does not
            wait for longer than its own time; the loading goes on, and the next probe finds it done.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, idle_s: float = 900.0, load_s: float = 600.0) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._load_s = load_s
        self._child: ProbeChild | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[str] | None = None

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
        if self._ending is not None:
            await self._ending
        await self._drop()

    async def _ask(self, ask: Ask) -> ProbeFinished:
        if self._idle is not None:
            self._idle.cancel()
        child, finished, why, late = None, None, "", False
        try:
            child = await self._warm()
            async with asyncio.timeout(ask.deadline - self._clock.monotonic()):
                if await child.loaded():
                    finished = await child.ask(ask)
        except TimeoutError:
            why, late = f"no result within {ask.probe.timeout_s:g} s", True
        except (OSError, MalformedMessage) as error:
            why = f"the probe process broke: {error}"
        finally:
            is_kept = finished is not None or (child is not None and child.is_loading)
            # Cancelled, late or broken in the middle of a probe: such a process is in no state to be asked again.
            how = "" if is_kept else await self._drop()
        if is_kept:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._rest)
        if finished is not None:
            return finished
        at = "" if child is None else f" at: {child.doing}"
        began = late and child is not None and child.began  # a process that breaks says nothing of the nodes
        return _failed(ask.probe, f"{why or f'the probe process ended ({how})'}{at}", began=began)

    async def _warm(self) -> ProbeChild:
        if self._child is not None and not self._child.alive:
            await self._drop()
        if self._child is None:
            self._child = ProbeChild(asyncio.get_running_loop().time() + self._load_s)
        return self._child

    async def _drop(self) -> str:
        """Ends the process, if there is one, and says how it ended."""
        child, self._child = self._child, None
        return "" if child is None else await child.end()

    def _rest(self) -> None:
        if not self._turn.locked():
            self._ending = asyncio.get_running_loop().create_task(self._drop())


def _failed(probe: RunProbe, detail: str, *, began: bool = False) -> ProbeFinished:
    return ProbeFinished(probe=probe.probe, ok=False, detail=detail[:2000], began=began)
