"""How soon an agent knows that a rank was killed, by the memory that the rank has touched.

Used by ``python -m bench.recovery --only deaths``. Each trial kills one process that is connected to an agent's socket,
in turns one that holds a robust mutex and one that, as in systems without it, has its socket alone.

    python -m bench.recovery_rows.deaths SOCKET GIB with|without    # the process to be killed
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from bench.table import Row
from everstep.host.robust_mutex import HeldMutex
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, FromAgent, Hello, RankHeartbeat, Welcome
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.jobs.socket import AgentSocketServer

SMALL_GIB, LARGE_GIB = 0.01, 2.4
FLOOR_MS, AIM_MS = 20.0, 5.0
SETTLE_S = 0.5
"""Seconds from the last tick of a rank to its death, so that the agent waits and nothing else runs."""


class _Deaths:
    """The part of a job registry that the socket calls."""

    def __init__(self) -> None:
        self.ready, self.known = asyncio.Event(), asyncio.Event()
        self.known_at = 0.0

    def handle_hello(self, *_: object) -> None: ...

    def handle_message(self, *_: object) -> None:
        self.ready.set()

    def handle_disconnect(self, *_: object) -> None:
        self.known_at = perf_counter()
        self.known.set()


async def _trial(gib: float, witness: str) -> tuple[float, float]:
    """Kill one rank; return the seconds until the agent knows, and until the process is reaped."""
    with tempfile.TemporaryDirectory() as folder:
        deaths, path = _Deaths(), Path(folder) / "agent.sock"
        welcome = Welcome(protocol=1, node="n1", vault_socket="", rank_heartbeat_interval_s=1.0)
        server = AgentSocketServer(path, welcome, cast(JobRegistry, deaths), 4)
        await server.start()
        rank = subprocess.Popen([sys.executable, "-m", "bench.recovery_rows.deaths", str(path), str(gib), witness])
        try:
            await deaths.ready.wait()
            await asyncio.sleep(SETTLE_S)
            reaped = asyncio.create_task(asyncio.to_thread(_wait_reaped, rank))
            await asyncio.sleep(0.05)
            at = perf_counter()
            rank.send_signal(signal.SIGKILL)
            await deaths.known.wait()
            return deaths.known_at - at, await reaped - at
        finally:
            rank.kill()
            rank.wait()
            server.close()


def _wait_reaped(rank: subprocess.Popen[bytes]) -> float:
    rank.wait()
    return perf_counter()


def name_of(gib: float) -> str:
    """Return the beginning of the names of the rows for a rank that touched so much."""
    size = f"{gib:g} GiB" if gib >= 1 else f"{round(gib * 1000)} MiB"
    return f"SIGKILL with {size} touched"


def rows(repeats: int) -> list[Row]:
    """SIGKILL to the agent's knowledge, without and with the mutex in turns, and to the end of the process."""
    result = []
    for gib in (SMALL_GIB, LARGE_GIB):
        known: dict[str, list[float]] = {"without": [], "with": []}
        reaped: list[float] = []
        for _ in range(repeats):
            for witness, times in known.items():
                known_s, reaped_s = asyncio.run(_trial(gib, witness))
                times.append(known_s * 1e3)
                reaped.append(reaped_s * 1e3)
        name = name_of(gib)
        for witness, by, floor, aim in (("without", "socket", None, None), ("with", "mutex", FLOOR_MS, AIM_MS)):
            times = known[witness]
            result += [
                Row(f"{name}, known by {by}, median of {repeats}", statistics.median(times), "ms", floor, aim),
                Row(f"{name}, known by {by}, maximum", max(times), "ms"),
            ]
        result.append(Row(f"{name}, reaped, median", statistics.median(reaped), "ms"))
    return result


def _be_rank(path: str, gib: float, witness: str) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # as malloc would, and touched at once
    held: list[Any] = [mmap.mmap(-1, max(mmap.PAGESIZE, int(gib * 2**30)), flags)]
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(path)
    agent.sendall(encode_frame(Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=os.getpid(), local_rank=0)))
    decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, 1 << 16, 1)
        held += map(HeldMutex, descriptors if witness == "with" else ())
        if decoder.feed(data):
            break
    agent.sendall(encode_frame(RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1)))
    time.sleep(3600)


if __name__ == "__main__":
    _be_rank(sys.argv[1], float(sys.argv[2]), sys.argv[3])
