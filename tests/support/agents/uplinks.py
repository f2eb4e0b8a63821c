"""Uplinks in a test's event loop, with a fake agent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from everstep.errors import EverstepError
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import GpuGauges
from everstep.wire.v1.directives import Directive, StopJob
from everstep.wire.v1.training import RankLost, RankProgress
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.client import Uplink
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, NodeDescription
from everstep_agent.uplink.spool import Spool
from tests.support.agents.controller_stub import DEADLINE_S, ControllerStub

T = TypeVar("T")
TOKEN = "agent:n1:mac"


class FakeNode:
    """The fake agent of an uplink, with set answers and recorded directives."""

    def __init__(self) -> None:
        self.vault = "127.0.0.1:7702"
        self.seen: tuple[Finding, ...] = ()
        self.directives: list[Directive] = []
        self.registrations = 0
        self.shown: list[list[str]] = []
        self.round_trips: list[float] = []

    def describe_node(self) -> NodeDescription:
        return NodeDescription(vault=self.vault)

    def findings(self) -> tuple[Finding, ...]:
        return self.seen

    def rank_progress(self) -> tuple[RankProgress, ...]:
        return (RankProgress(job="j", generation=1, rank=0, step=3, step_s=0.1),)

    def gpu_gauges(self) -> tuple[GpuGauges, ...]:
        return ()

    def is_busy(self) -> bool:
        return True

    def on_new_controller(self, known_jobs: Collection[str]) -> None:
        self.registrations += not known_jobs
        self.shown.append(sorted(known_jobs))

    def on_directives(self, directives: list[Directive]) -> None:
        self.directives += directives

    def on_server_time(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        self.round_trips.append(round_trip_s)


class RunningUplink:
    """A running uplink with its fake agent and its spool."""

    def __init__(self, node: FakeNode, uplink: Uplink, spool: Spool) -> None:
        self.node = node
        self.uplink = uplink
        self.spool = spool


class UplinkBench:
    """Settings and files for the uplinks of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN + "\n")

    @contextlib.asynccontextmanager
    async def running_uplink(
        self, *urls: str, uniform: Callable[[], float] = random.random, **settings: Any
    ) -> AsyncIterator[RunningUplink]:
        defaults = {
            "connect_timeout_s": 1.0,
            "answer_timeout_s": DEADLINE_S,
            "report_batch_window_s": 0.05,
            "token_file": self.token_file,
        }
        chosen = AgentSettings.from_values(
            node="n1", controllers=urls, run_dir=self.directory, **{**defaults, **settings}
        )
        spool = Spool(None, max_reports=5000, max_bytes=8 << 20, batch_window_s=chosen.reports.report_batch_window_s)
        node = FakeNode()
        uplink = Uplink(chosen, HeartbeatProtocol("n1", 7, "0.1.0"), spool, node, SYSTEM_CLOCK, uniform)
        running = asyncio.create_task(uplink.run())
        try:
            yield RunningUplink(node, uplink, spool)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def until(condition: Callable[[], T]) -> T:
    """Wait until ``condition`` is true, and return its value. Raises TimeoutError after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := condition()):
            await asyncio.sleep(0.002)
        return found


async def until_nudged(line: RunningUplink, condition: Callable[[], T]) -> T:
    """Wait as ``until`` does, and request heartbeats meanwhile, so that a slow retry does not delay the test."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := condition()):
            line.uplink.beat_now()
            await asyncio.sleep(0.002)
        return found


def lost(rank: int = 0, detail: str = "gone") -> RankLost:
    return RankLost(job="j", at=0.0, generation=1, rank=rank, local_rank=rank, detail=detail)


def stop(job: str = "j") -> StopJob:
    return StopJob(job=job, ok=True, reason="done")


def refuse_once(controller: ControllerStub, route: str, error: EverstepError) -> None:
    """Answer the next request of that route with the error."""

    def refuse(body: bytes) -> None:
        del controller.refusals[route]
        raise error

    controller.refusals[route] = refuse


def refuse_always(controller: ControllerStub, route: str, error: EverstepError) -> None:
    """Answer every request of that route with the error from now on."""

    def refuse(body: bytes) -> None:
        raise error

    controller.refusals[route] = refuse
