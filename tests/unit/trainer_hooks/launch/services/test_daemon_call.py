"""Calls that may block for ever, awaited on an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from everstep_trainer.launch.services.daemon_call import call_in_daemon


def test_result_and_error_of_a_call_are_passed_on() -> None:
    assert asyncio.run(call_in_daemon(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(call_in_daemon(lambda: 1 // 0))


def test_hanging_call_does_not_keep_the_loop_from_ending() -> None:
    begun, never = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return never.wait(60)

    async def cancelled() -> bool:
        task = asyncio.create_task(call_in_daemon(hang))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())
    assert not never.is_set(), "the loop has ended while the call goes on"
    never.set()
