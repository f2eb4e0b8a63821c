"""A fleet loop over an empty fleet, with a database that a test can block and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from everstep.clock import Clock
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.startup import restore_state
from everstep_controller.policy.rulebook import with_rules
from everstep_controller.read_models.fleet_views import ReadModels
from everstep_controller.read_models.prometheus import Metrics
from everstep_controller.runtime.clock import SteadyTime
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.transaction import DecideFunction, EventNumbers, Transaction
from everstep_controller.store.database_errors import LeadershipLost
from everstep_controller.store.rows import Batch, EventLogRow
from tests.support.fleet.controllers import registration


class Disk:
    """A database whose commits wait for ``open``, and raise ``failure``."""

    def __init__(self) -> None:
        self.written: list[Batch] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None
        self.tries = 0

    async def commit(self, batch: Batch) -> None:
        self.tries += 1
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        if batch:
            self.written.append(batch)


class Running:
    """A running loop as an asynchronous context manager."""

    def __init__(
        self,
        *,
        queue_limit: int = 100,
        clock: Clock = SYSTEM_CLOCK,
        decide: DecideFunction = engine.handle,
        **options: Any,
    ) -> None:
        self.disk = Disk()
        self.events: list[EventLogRow] = []
        self.outbox = Outbox(1)
        self.loop = FleetLoop(
            state=restore_state(with_rules(CorePolicy.lab_preset()), None, [], [], []),
            outbox=self.outbox,
            commit=self.disk.commit,
            clock=SteadyTime(clock),
            metrics=Metrics(),
            event_numbers=EventNumbers(0),
            read_models=ReadModels(),
            on_events=self.events.extend,
            on_remediations=lambda _remediations: None,
            decide=decide,
            queue_limit=queue_limit,
            **options,
        )

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(self.loop.run())
        await self.loop.started.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, OSError, LeadershipLost):
            await self.task

    def register(self, node: str, *, forgettable: bool = False) -> asyncio.Task[str]:
        """Begin a registration. Its result is the node's name."""
        event = ev.AgentRegistered(register=registration(node), trace=f"t-{node}")

        def stimulus(tx: Transaction, now: float) -> str:
            tx.is_ephemeral = forgettable
            tx.handle(event, now)
            return node

        return asyncio.create_task(self.loop.submit(stimulus))


def scenario(body: Callable[[Running], Awaitable[Any]], **options: Any) -> Any:
    """Run ``body`` with a running loop."""

    async def run() -> Any:
        async with Running(**options) as running:
            return await body(running)

    return asyncio.run(run())


async def settle() -> None:
    """Run all tasks until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)
