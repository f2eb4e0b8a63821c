"""An asyncio event loop in virtual time. The tasks of a simulated process end with the process."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from everstep.errors import EverstepError
from tests.sim.cluster.timeline import Timeline, Timer

Call = Callable[[], None]


class _Handle:
    """A scheduled call, with the interface of ``asyncio.Handle``."""

    def __init__(self, loop: VirtualLoop, delay_s: float, call: Call, context: contextvars.Context | None) -> None:
        self._call = functools.partial((context or contextvars.copy_context()).run, call)
        self._timer: Timer = loop.timeline.after(delay_s, lambda: loop.call_when_running(self._run))
        self._loop = loop
        self._cancelled = False

    def _run(self) -> None:
        if not self._cancelled:
            self._loop.enter(self._call)

    def cancel(self) -> None:
        self._cancelled = True
        self._timer.cancel()

    def cancelled(self) -> bool:
        return self._cancelled


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop with timers, futures, tasks, and blocking calls.

    Args:
        timeline: The world's timeline.
        call_when_running: Makes a call in the loop's process: now, when a stopped process resumes, or never.
        to_world_s: Converts seconds of the process's clock to seconds of the world.
        call_blocking: Makes a blocking call in place of a thread, and passes the outcome to a function.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        call_when_running: Callable[[Call], None],
        to_world_s: Callable[[float], float],
        call_blocking: Callable[[Callable[[], Any], Callable[[Any, EverstepError | None], None]], None],
    ) -> None:
        self.timeline = timeline
        self.call_when_running = call_when_running
        self._real_s = to_world_s
        self._call_blocking = call_blocking
        self._tasks: list[tuple[asyncio.Task[Any], Any]] = []

    def enter(self, call: Callable[[], object]) -> None:
        """Make a call while asyncio sees this loop as the running one."""
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            call()
        finally:
            asyncio._set_running_loop(previous)

    def time(self) -> float:
        return self.timeline.now

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        return _Handle(self, 0.0, functools.partial(callback, *arguments), context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *arguments: Any, context: Any = None
    ) -> Any:
        return _Handle(self, self._real_s(delay), functools.partial(callback, *arguments), context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *arguments: Any, context: Any = None
    ) -> Any:
        return _Handle(self, when - self.time(), functools.partial(callback, *arguments), context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, name=name, context=context)
        task.add_done_callback(_raise_error)
        self._tasks = [pair for pair in self._tasks if not pair[0].done()] + [(task, coroutine)]
        return task

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a task from outside the loop."""
        self.enter(lambda: self.create_task(coroutine))

    def end(self) -> None:
        """End all tasks at the point where they are, because their process was killed."""
        tasks, self._tasks = self._tasks, []
        for task, coroutine in tasks:
            if not task.done():
                coroutine.close()

    def run_in_executor(self, executor: Any, func: Any, *arguments: Any) -> Any:  # type: ignore[override]
        future = self.create_future()

        def resolve(result: Any, error: EverstepError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._call_blocking(
            functools.partial(func, *arguments),
            lambda result, error: self.call_when_running(lambda: self.enter(lambda: resolve(result, error))),
        )
        return future

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore asyncio's errors, since tasks of a killed process are never awaited."""


def _raise_error(task: asyncio.Task[Any]) -> None:
    """Raise the error of a failed task, which ends the world."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
