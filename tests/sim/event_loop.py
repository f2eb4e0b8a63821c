"""asyncio in virtual time: the tasks of one simulated process run on the world's timeline, and stop when it does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from everstep.errors import EverstepError
from tests.sim.timeline import Timeline, Timer

Call = Callable[[], None]


class _Handle:
    """A call to come, as asyncio wants to have it cancelled."""

    def __init__(self, loop: VirtualLoop, delay_s: float, call: Call, context: contextvars.Context | None) -> None:
        self._run = functools.partial((context or contextvars.copy_context()).run, call)
        self._timer: Timer = loop.timeline.after(delay_s, lambda: loop.do(self._now))
        self._loop = loop
        self._cancelled = False

    def _now(self) -> None:
        if not self._cancelled:
            self._loop.enter(self._run)

    def cancel(self) -> None:
        self._cancelled = True
        self._timer.cancel()

    def cancelled(self) -> bool:
        return self._cancelled


class VirtualLoop(asyncio.AbstractEventLoop):
    """What coroutines need of an event loop: timers, futures, tasks, and threads for calls that block.

    Args:
        do: runs a call in the process that this loop is of: now, when that runs again, or never.
        real_s: how long seconds of the process's clock are in the world's time.
        carry: makes a blocking call on a thread's behalf; the outcome goes to the function that it is given.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        do: Callable[[Call], None],
        real_s: Callable[[float], float],
        carry: Callable[[Callable[[], Any], Callable[[Any, EverstepError | None], None]], None],
    ) -> None:
        self.timeline = timeline
        self.do = do
        self._real_s = real_s
        self._carry = carry
        self._tasks: list[tuple[asyncio.Task[Any], Any]] = []

    def enter(self, call: Call) -> None:
        """Runs ``call`` as this loop's."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            call()
        finally:
            asyncio._set_running_loop(before)

    def time(self) -> float:
        return self.timeline.now

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return _Handle(self, 0.0, functools.partial(callback, *arguments), context)

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return _Handle(self, self._real_s(delay), functools.partial(callback, *arguments), context)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return _Handle(self, when - self.time(), functools.partial(callback, *arguments), context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=self, name=name, context=context)
        task.add_done_callback(_fail_aloud)
        self._tasks = [pair for pair in self._tasks if not pair[0].done()] + [(task, coroutine)]
        return task

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Starts a task from outside of the loop."""
        self.enter(lambda: self.create_task(coroutine))

    def end(self) -> None:
        """The process is no more, wherever its tasks are."""
        tasks, self._tasks = self._tasks, []
        for task, coroutine in tasks:
            if not task.done():
                coroutine.close()

    def run_in_executor(self, executor: Any, func: Any, *arguments: Any) -> Any:
        future = self.create_future()

        def outcome(result: Any, error: EverstepError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._carry(
            functools.partial(func, *arguments),
            lambda result, error: self.do(lambda: self.enter(lambda: outcome(result, error))),
        )
        return future

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of a process that was killed are never awaited: asyncio says so of each of them."""


def _fail_aloud(task: asyncio.Task[Any]) -> None:
    """A task that ends by an error is the end of its world."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
