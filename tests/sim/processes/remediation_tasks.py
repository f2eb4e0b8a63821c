"""Run a leader's remediations in virtual time: the real executor and cordon observer, over calls to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.clock import Backoff
from everstep.errors import EverstepError, Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import SchedulerStateChanged
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.remediator import CordonStatus
from everstep_controller.remediation.service import CordonObserver
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.store.rows import RemediationRow
from tests.sim.cluster import scheduler
from tests.sim.cluster.event_loop import VirtualLoop
from tests.sim.cluster.observations import RemediationReadBack, RemediationRequested

if TYPE_CHECKING:
    from tests.sim.processes.controller import ControllerProcess

OBSERVE_S = 2.0
"""Seconds between two looks of the observer at the scheduler's cordons."""
TIMEOUT_S = 1.5
"""Seconds until an unanswered call is given up."""
LOST_ANSWERS_SHARE = 0.1
"""Share of accepted requests whose answers are lost."""
SENT_SHARE = 0.5
"""Share of calls that still arrive after the death of the process that made them."""
BACKOFF = Backoff(floor_s=0.2, ceiling_s=2.0)
"""Waits between two tries of the executor, in seconds."""
PATIENCE_S = {
    RemediationKind.CORDON: 10.0,
    RemediationKind.UNCORDON: 10.0,
    RemediationKind.RESET_GPU: 15.0,
    RemediationKind.REBOOT: 30.0,
    RemediationKind.REPAIR: 10.0,
}
"""The executor's own patience, with minutes turned into seconds."""


class SchedulerClient:
    """Implement ``Remediator``: one controller's connection to the scheduler for one term as leader."""

    name = "simulated"
    dry_run = False
    kinds = frozenset(RemediationKind)

    def __init__(self, controller: ControllerProcess) -> None:
        self._world = controller.world
        self._scheduler = controller.world.scheduler
        self._controller, self._epoch = controller.name, controller.epoch

    def apply(self, remediation: Remediation) -> None:
        self._check_reachable()
        self._world.observe(
            RemediationRequested(self._controller, self._epoch, remediation.id, remediation.node, remediation.kind)
        )
        self._scheduler.apply(remediation)
        if self._scheduler.rng.random() < LOST_ANSWERS_SHARE:
            raise Unavailable("the connection broke before the answer")

    def is_done(self, remediation: Remediation) -> bool:
        self._check_reachable()
        done = self._scheduler.is_done(remediation)
        self._world.observe(RemediationReadBack(self._controller, self._epoch, remediation.id, done))
        return done

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        self._check_reachable()
        return self._scheduler.cordon_status(nodes)

    def close(self) -> None: ...

    def _check_reachable(self) -> None:
        is_connected = self._world.network.connected(self._controller, scheduler.HOST)
        if self._scheduler.is_unavailable or not is_connected:
            raise Unavailable("the scheduler does not answer")


class RemediationTasks:
    """The remediation tasks of a leader, for one term. ``rows``: remediations that an earlier leader left."""

    def __init__(self, controller: ControllerProcess, rows: Iterable[RemediationRow]) -> None:
        self._controller = controller
        self._world, self._incarnation = controller.world, controller.incarnation
        self._loop = VirtualLoop(  # type: ignore[abstract]  # asyncio calls none of the other methods
            self._world.timeline,
            call_when_running=self._call_when_running,
            to_world_s=controller.clock.to_world_s,
            call_blocking=self._call_scheduler,
        )
        client = SchedulerClient(controller)
        self._executor = RemediationExecutor(
            client,
            submit=self._submit,
            now=controller.now,
            uniform=self._world.scheduler.rng.random,
            check_leading=controller.check_leading,
            rows=rows,
            backoff=BACKOFF,
            patience_s=PATIENCE_S,
        )
        self._observer = CordonObserver(client, controller.state, self._submit_event, is_idle=self._executor.is_idle)

    def start(self) -> None:
        """Start the executor and the observer once the controller leads."""
        self._loop.enter(self._executor.start)
        self._loop.start_task(self._observer.run(OBSERVE_S))

    def end(self) -> None:
        """End all tasks, because the process was killed."""
        self._loop.end()

    def enqueue(self, rows: list[RemediationRow]) -> None:
        """Enqueue remediations that have just become durable, in order."""
        if rows:
            self._loop.enter(lambda: self._executor.enqueue(rows))

    def _call_when_running(self, call: Callable[[], None]) -> None:
        self._controller.call_when_running(self._incarnation, call)

    async def _submit(self, stimulus: Callable[[Transaction, float], None]) -> None:
        """Run ``stimulus`` in a transaction, and wait until its changes are durable."""
        self._controller.check_leading()
        done = self._loop.create_future()

        def resolve(promise: Any) -> None:
            error = promise.exception()
            if error is not None:
                self._loop.enter(lambda: done.set_exception(error))
            else:
                self._loop.enter(lambda: done.set_result(None))

        self._controller.enqueue(stimulus).add_done_callback(resolve)
        await done

    async def _submit_event(self, event: SchedulerStateChanged) -> None:
        traced = msgspec.structs.replace(event, trace=self._world.trace_id("observer"))
        await self._submit(lambda tx, now: (tx.handle(traced, now), None)[1])

    def _call_scheduler(self, call: Callable[[], Any], on_result: Callable[[Any, EverstepError | None], None]) -> None:
        """Make a blocking call, with delays of the call and of its answer. An unavailable scheduler never answers."""
        rng, timeline = self._world.scheduler.rng, self._world.timeline
        call_s, answer_s = (0.005 + 0.02 * rng.random() + self._world.scheduler.extra_delay_s for _ in range(2))
        is_sent = rng.random() < SENT_SHARE

        def arrive() -> None:
            if not (is_sent or self._controller.is_current(self._incarnation)):
                return
            try:
                result = call()
            except Unavailable as error:
                timeline.after(TIMEOUT_S, lambda e=error: on_result(None, e))  # type: ignore[misc]
            except EverstepError as error:
                timeline.after(answer_s, lambda e=error: on_result(None, e))  # type: ignore[misc]
            else:
                timeline.after(answer_s, lambda: on_result(result, None))

        timeline.after(call_s, arrive)
