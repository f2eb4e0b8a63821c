"""Everything that a leading controller does towards the outside: remedies, a look at the scheduler, alerts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep_controller.config import ControllerSettings, read_password, read_secret
from everstep_controller.core.events import SchedulerStateChanged
from everstep_controller.core.state import FleetState
from everstep_controller.remediation.alerts import AlertNotifier, Write, possibly_notified
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.kubernetes import KubernetesRemediator, connect
from everstep_controller.remediation.remediator import (
    CORDON_OWNER,
    CordonStatus,
    DryRunRemediator,
    Remediator,
    UnexpectedFailure,
    call_guarded,
)
from everstep_controller.remediation.slurm import SlurmRemediator
from everstep_controller.remediation.webhook import WebhookRemediator
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.store.rows import LoadedState

# ---- observer
# What the scheduler shows of nodes, looked at now and then; the core hears of every change.

log = logging.getLogger(__name__)

OBSERVE_INTERVAL_S = 15.0
"""Seconds between two looks: how long a person's cordon may go unnoticed."""

SubmitEvent = Callable[[SchedulerStateChanged], Awaitable[None]]
"""Hands an event to the loop."""


class CordonObserver:
    """Asks the remediator for the standing of all nodes and tells what differs from the records.

    Args:
        failed: called for each look that failed unexpectedly.
        settled: whether nothing that was asked for at a node is still under way.
    """

    def __init__(
        self,
        remediator: Remediator,
        state: FleetState,
        submit_event: SubmitEvent,
        on_failure: Callable[[], None] = lambda: None,
        is_idle: Callable[[str], bool] = lambda node: True,
    ) -> None:
        self._settled = is_idle
        self._own_cordons: dict[str, str] = {}
        self._remediator = remediator
        self._state = state
        self._tell = submit_event
        self._failed = on_failure

    async def run(self, every_s: float = OBSERVE_INTERVAL_S) -> None:
        """Looks until cancelled."""
        while True:
            try:
                await self.observe()
            except EverstepError as error:  # it, or the database, is away: what changed is seen at the next look
                if isinstance(error, UnexpectedFailure):
                    self._failed()
                log.warning("what %s shows of the nodes could not be taken up: %s", self._remediator.name, error)
            await asyncio.sleep(every_s)

    async def observe(self) -> None:
        """One look. Raises what the remediator, or the loop, raises."""
        nodes = list(self._state.nodes)
        before = {} if self._state.database_outage else self._cordoned()
        shown = await asyncio.to_thread(call_guarded, self._remediator.cordon_status, nodes)
        for node in nodes:
            seen = shown.get(node, CordonStatus())
            foreign = "" if seen.cordoned_by == CORDON_OWNER else seen.cordoned_by
            record = self._state.nodes.get(node)
            if record is None:
                continue
            gone = "" if seen.cordoned_by or node not in shown else self._lifted_cordon(node, record.cordon_id, before)
            if seen.cordoned_by == CORDON_OWNER and node in before:
                self._own_cordons[node] = before[node]
            if gone or foreign != record.external_cordon_by:
                reason = seen.reason[:1024]
                await self._tell(
                    SchedulerStateChanged(node=node, cordoned_by=foreign, reason=reason, lifted_cordon_id=gone)
                )

    def _cordoned(self) -> dict[str, str]:
        """Nodes that Everstep has out of service with the scheduler, by the remedy that is not under way any more."""
        nodes = self._state.nodes.items()
        return {node: record.cordon_id for node, record in nodes if record.cordon_id and self._settled(node)}

    def _lifted_cordon(self, node: str, cordoned: str, before: dict[str, str]) -> str:
        """The remedy whose cordon an earlier look has shown, and which stood in the records before this one and after;
        empty where there is none: what is only decided, or was never taken, is not gone."""
        return cordoned if cordoned and cordoned == before.get(node) == self._own_cordons.get(node) else ""


# ---- choose
# The remediator that the settings name.


def create_remediator(settings: ControllerSettings, clock: Clock) -> Remediator:
    """Raises ConfigurationError where what it needs is missing."""
    match settings.remediation:
        case "webhook":
            secret = read_secret(settings.webhook_secret_file)
            return WebhookRemediator(
                settings.webhook_url, secret, wall=clock.wall, cordons=settings.webhook_reports_cordons
            )
        case "slurm":
            return SlurmRemediator(configuration=settings.slurm_conf)
        case "kubernetes":
            return KubernetesRemediator(connect(settings.kubeconfig), evict=settings.kubernetes_evict)
        case _:
            return DryRunRemediator()


class RemediationService:
    """Made for one time of leading. Every method belongs to the event loop's thread.

    Args:
        loaded: what earlier lives left: remedies, and alerts that they told.
        write_alerts: keeps what was told.
        failed: called for each remedy that is given up, and each post of alerts that failed.

    Attributes:
        ended: raises what a part of it has failed with: nobody would look after that part any more.

    Raises ConfigurationError for settings that cannot be.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        remediator: Remediator,
        *,
        loop: FleetLoop,
        state: FleetState,
        loaded: LoadedState,
        write_alerts: Write,
        on_failure: Callable[[], None],
    ) -> None:
        self._loop = loop
        self.executor = RemediationExecutor(
            remediator,
            submit=loop.submit,
            now=loop.now,
            uniform=random.random,
            check_leading=loop.check_leading,
            on_failure=on_failure,
            on_task=self._watch,
            rows=loaded.remediations,
        )
        self._observer = CordonObserver(remediator, state, self._tell, on_failure, self.executor.is_idle)
        self._alerting = None
        if settings.alert_url:
            self._alerting = AlertNotifier(
                settings.alert_url,
                token=read_password(settings.alert_token_file) if settings.alert_token_file else "",
                controller=f"{'https' if settings.tls_certificate else 'http'}://{settings.name}",
                state=state,
                now=loop.now,
                write=write_alerts,
                notified=possibly_notified(loaded),
                check_leading=loop.check_leading,
                on_failure=on_failure,
            )
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _tell(self, event: SchedulerStateChanged) -> None:
        def stimulus(tx: Transaction, now: float) -> None:
            tx.handle(msgspec.structs.replace(event, trace=trace), now)

        trace = new_trace()
        await self._loop.submit(stimulus)

    def start(self) -> None:
        """Call once the loop runs."""
        self.executor.start()
        self._tasks = [asyncio.create_task(self._observer.run(), name="observer")]
        if self._alerting is not None:
            self._tasks.append(asyncio.create_task(self._alerting.run(), name="alerting"))
        for task in self._tasks:
            self._watch(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def stop(self) -> None:
        """Leaves what is under way to the next life."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.executor.stop()
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # heard, whoever waited for it
