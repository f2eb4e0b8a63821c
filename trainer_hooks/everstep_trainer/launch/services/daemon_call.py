"""Wait on an event loop for a call that may block for ever, such as one to a storage that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def call_in_daemon(function: Callable[[], T]) -> T:
    """Return what ``function`` returns, called in a thread that does not outlive the process.

    ``asyncio.to_thread`` has a thread that the end of the loop waits for: a signal could not end a launcher whose call
    hangs. Here a cancelled call goes on unseen until the process ends.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():
            set_outcome()

    def call() -> None:
        try:
            set_outcome = partial(outcome.set_result, function())
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            set_outcome = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=call, name="everstep-call", daemon=True).start()
    return await outcome
