"""Waiting for a subprocess on the event loop, without a thread."""

from __future__ import annotations

import asyncio
import os
import subprocess


async def death(process: subprocess.Popen[bytes]) -> int:
    """Returns the process's status once it is dead and reaped."""
    if process.poll() is None:
        await _readable(os.pidfd_open(process.pid))
    return process.wait()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    loop.add_reader(descriptor, happened.set)
    try:
        await happened.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
