"""The supervisor's side of probing: one warm probe process, one probe at a time, and always an answer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from everstep.errors import MalformedMessage
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import ProbeFinished
from everstep_agent.lifecycle import end_child, start_child
from everstep_agent.probes.probe_messages import MAX_FRAME_BYTES, FromChild, ProbeRequest, ProbeStage, TorchLoaded

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
REAP_WAIT_S = 10.0


class ProbeChild:
    """A running probe process, created inside an event loop. Torch must be loaded by ``load_deadline`` (loop time)."""

    def __init__(self, load_deadline: float) -> None:
        # the answer contains the failure, so torch need not log it
        self._process, self._channel = start_child("everstep_agent.probes.child", TORCH_CPP_LOG_LEVEL="FATAL")
        self._decoder: FrameDecoder[FromChild] = FrameDecoder(FromChild, MAX_FRAME_BYTES)
        self._messages: deque[FromChild] = deque()
        self.stage = "loading torch"
        self.has_begun = False
        self._is_disconnected = False
        self._load_deadline = load_deadline
        self._loading = asyncio.get_running_loop().create_task(self._load())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_loading(self) -> bool:
        """Whether torch is still loading and within its deadline."""
        return not self._loading.done() and asyncio.get_running_loop().time() < self._load_deadline

    async def wait_loaded(self) -> bool:
        """Wait until torch is loaded; returns False if the process ended before. Cancelling the wait does not stop the
        loading. Raises OSError, MalformedMessage."""
        return await asyncio.shield(self._loading)

    async def _load(self) -> bool:
        return isinstance(await self._next_message(), TorchLoaded)

    async def run_probe(self, request: ProbeRequest) -> ProbeFinished | None:
        """Return the answer, or None if the process ended without one.

        ``stage`` holds the process's last step, and ``has_begun`` whether it had reached the probe itself. Raises
        OSError, MalformedMessage.
        """
        self.stage, self.has_begun = "beginning", False
        await asyncio.get_running_loop().sock_sendall(self._channel, encode_frame(request))
        while (message := await self._next_message()) is not None:
            if isinstance(message, ProbeStage):
                self.stage, self.has_begun = message.description, True
            elif isinstance(message, ProbeFinished):
                return message
        return None

    async def _next_message(self) -> FromChild | None:
        """Return the next message, or None once the process has disconnected."""
        while not self._messages:
            data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
            if not data:
                self._is_disconnected = True
                return None
            self._messages.extend(self._decoder.feed(data))
        return self._messages.popleft()

    async def kill(self) -> str:
        """Kill the process and describe how it ended."""
        try:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        finally:
            self._channel.close()
        return await end_child(self._process, REAP_WAIT_S, is_ending=self._is_disconnected)


class Prober:
    """Run probes in a process that has torch loaded; start it at the first probe.

    A probe does not wait for the loading longer than its own time-out: the loading continues, and the next probe finds
    it done. The process is ended after ``idle_timeout_s`` without a probe, since torch holds some 200 MB.
    """

    def __init__(self, *, idle_timeout_s: float = 900.0, load_timeout_s: float = 600.0) -> None:
        self._idle_s = idle_timeout_s
        self._load_s = load_timeout_s
        self._child: ProbeChild | None = None
        self._probe_lock = asyncio.Lock()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[str] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the warm probe process, if there is one."""
        return None if self._child is None else self._child.pid

    async def run(self, probe: RunProbe, node: str, products: Sequence[WrongProduct] = ()) -> ProbeFinished:
        """Take part in ``probe`` as ``node``. Any failure becomes an answer with ``ok=False``, never an exception. The
        answer comes within ``probe.timeout_s``, including the loading of torch. A probe of kind compute tries
        ``products`` again, which ranks of this node computed wrongly."""
        deadline = SYSTEM_CLOCK.monotonic() + probe.timeout_s
        if node not in probe.nodes:
            return _failed_result(probe, f"{node} is not one of the nodes of this probe")
        try:
            async with asyncio.timeout(probe.timeout_s):
                await self._probe_lock.acquire()
        except TimeoutError:
            return _failed_result(probe, f"no result within {probe.timeout_s:g} s: an earlier probe took all of it")
        try:
            request = ProbeRequest(probe=probe, node=node, deadline=deadline, products=tuple(products))
            finished = await self._run_in_child(request)
        finally:
            self._probe_lock.release()
        if not finished.ok:
            logger.warning("probe %s failed: %s", probe.probe, finished.detail, extra={"node": node})
        return finished

    async def close(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._ending is not None:
            await self._ending
        await self._end_child()

    async def _run_in_child(self, request: ProbeRequest) -> ProbeFinished:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        child, finished, reason, late = None, None, "", False
        try:
            if self._child is not None and not self._child.is_alive:
                await self._end_child()
            if self._child is None:
                self._child = ProbeChild(asyncio.get_running_loop().time() + self._load_s)
            child = self._child
            async with asyncio.timeout(request.deadline - SYSTEM_CLOCK.monotonic()):
                if await child.wait_loaded():
                    finished = await child.run_probe(request)
        except TimeoutError:
            reason, late = f"no result within {request.probe.timeout_s:g} s", True
        except (OSError, MalformedMessage) as error:
            reason = f"the probe process failed: {error}"
        finally:
            is_kept = finished is not None or (child is not None and child.is_loading)
            # A process that was cancelled, late or broken in the middle of a probe cannot be asked again.
            how = "" if is_kept else await self._end_child()
        if is_kept:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle_child)
        if finished is not None:
            return finished
        at = "" if child is None else f" at: {child.stage}"
        has_begun = late and child is not None and child.has_begun  # a process that breaks says nothing about the nodes
        return _failed_result(request.probe, f"{reason or f'the probe process ended ({how})'}{at}", has_begun=has_begun)

    async def _end_child(self) -> str:
        """End the process, if there is one, and describe how it ended."""
        child, self._child = self._child, None
        return "" if child is None else await child.kill()

    def _end_idle_child(self) -> None:
        if not self._probe_lock.locked():
            self._ending = asyncio.get_running_loop().create_task(self._end_child())


def _failed_result(probe: RunProbe, detail: str, *, has_begun: bool = False) -> ProbeFinished:
    return ProbeFinished(probe=probe.probe, ok=False, detail=detail[:2000], started=has_begun)
