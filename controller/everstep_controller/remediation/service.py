"""Run a leading controller's external work: remediations, observation of the scheduler's cordons, and alerts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep_controller.config import ControllerSettings, read_password, read_secret
from everstep_controller.core.events import SchedulerStateChanged
from everstep_controller.core.state import FleetState
from everstep_controller.remediation import remediator as interface
from everstep_controller.remediation.alerts import AlertNotifier, possibly_notified
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.kubernetes import KubernetesRemediator, connect
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus, Remediator, call_guarded
from everstep_controller.remediation.slurm import SlurmRemediator
from everstep_controller.remediation.webhook import WebhookRemediator
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import new_trace
from everstep_controller.store import table_access
from everstep_controller.store.rows import LoadedState
from everstep_controller.store.threads import DatabaseStore

# ---- cordon observer

log = logging.getLogger(__name__)

OBSERVE_INTERVAL_S = 15.0
"""Seconds between observations: how long a person's cordon may go unnoticed."""

SubmitEvent = Callable[[SchedulerStateChanged], Awaitable[None]]
"""Submits an event to the loop."""


@dataclass(eq=False)
class CordonObserver:
    """Compares the scheduler's cordons with the records, and reports every difference to the core."""

    remediator: Remediator
    state: FleetState
    submit_event: SubmitEvent
    on_failure: Callable[[], None] = lambda: None
    is_idle: Callable[[str], bool] = lambda node: True

    def __post_init__(self) -> None:
        self._own_cordons: dict[str, str] = {}

    async def run(self, every_s: float = OBSERVE_INTERVAL_S) -> None:
        """Observe until cancelled."""
        while True:
            try:
                await self.observe()
            except EverstepError as error:  # the next observation finds the change
                if isinstance(error, interface.UnexpectedFailure):
                    self.on_failure()
                log.warning("the cordons shown by %s could not be processed: %s", self.remediator.name, error)
            await asyncio.sleep(every_s)

    async def observe(self) -> None:
        """Observe once. Raises errors of the remediator or the loop."""
        nodes = list(self.state.nodes)
        before: dict[str, str] = {}  # ids of our finished cordons
        if not self.state.database.outage:
            before = {node: self.state.nodes[node].scheduling.cordon_id for node in filter(self.is_idle, nodes)}
        shown = await asyncio.to_thread(call_guarded, self.remediator.cordon_status, nodes)
        for node in nodes:
            seen = shown.get(node, CordonStatus())
            record = self.state.nodes.get(node)
            if record is None:
                continue
            cordon, lifted = record.scheduling.cordon_id, ""
            if seen.cordoned_by == CORDON_OWNER and before.get(node):
                self._own_cordons[node] = before[node]
            elif not seen.cordoned_by and node in shown and cordon == before.get(node) == self._own_cordons.get(node):
                lifted = cordon  # it was shown before, and has been lifted outside Everstep
            foreign = "" if seen.cordoned_by == CORDON_OWNER else seen.cordoned_by
            if lifted or foreign != record.scheduling.external_cordon_by:
                reason = seen.reason[:1024]
                event = SchedulerStateChanged(
                    node=node, cordoned_by=foreign, reason=reason, lifted_cordon_id=lifted, trace=new_trace()
                )
                await self.submit_event(event)


# ---- service


def create_remediator(settings: ControllerSettings, clock: Clock) -> Remediator:
    """Return the remediator that the settings name. Raises ConfigurationError if its requirements are missing."""
    chosen = settings.remediation
    match chosen.remediation_backend:
        case "webhook":
            secret, cordons = read_secret(chosen.webhook_secret_file), chosen.webhook_reports_cordons
            return WebhookRemediator(chosen.webhook_url, secret, wall=clock.wall, cordons=cordons)
        case "slurm":
            return SlurmRemediator(configuration=chosen.slurm_conf)
        case "kubernetes":
            return KubernetesRemediator(connect(chosen.kubeconfig), evict=chosen.kubernetes_evict_pods)
        case _:
            return interface.DryRunRemediator()


class RemediationService:
    """All external work of one leadership. Every method belongs to the event loop's thread.

    Raises ConfigurationError if the settings are invalid. ``failure`` is a future that raises the error of a failed
    part, because nothing would restart that part.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        remediator: Remediator,
        loop: FleetLoop,
        loaded: LoadedState,
        store: DatabaseStore,
    ) -> None:
        self._loop, on_failure = loop, loop.metrics.remediation_failures.inc
        self.executor = RemediationExecutor(
            remediator,
            submit=loop.submit,
            now=loop.now,
            uniform=random.random,
            check_leading=loop.check_leading,
            on_failure=on_failure,
            on_task=lambda task: task.add_done_callback(self._note_end),
            rows=loaded.remediations,
        )
        self._observer = CordonObserver(remediator, loop.state, self._submit_event, on_failure, self.executor.is_idle)
        self._alerting = None
        notifications = settings.notifications
        if notifications.alert_url:
            self._alerting = AlertNotifier(
                notifications.alert_url,
                token=read_password(notifications.alert_token_file) if notifications.alert_token_file else "",
                controller=f"{'https' if settings.tls.tls_certificate else 'http'}://{settings.process.name}",
                docs_url=notifications.docs_url,
                state=loop.state,
                now=loop.now,
                write=lambda begun, over: store.write(lambda held: table_access.write_alerts(held, begun, over)),
                notified=possibly_notified(loaded),
                check_leading=loop.check_leading,
                on_failure=on_failure,
            )
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _submit_event(self, event: SchedulerStateChanged) -> None:
        await self._loop.submit(lambda tx, now: tx.handle(event, now))

    def start(self) -> None:
        """Start all parts; call this once the loop runs."""
        self.executor.start()
        self._tasks = [asyncio.create_task(self._observer.run(), name="observer")]
        if self._alerting is not None:
            self._tasks.append(asyncio.create_task(self._alerting.run(), name="alerting"))
        for task in self._tasks:
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def stop(self) -> None:
        """Stop, and leave unfinished work to the next controller."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.executor.stop()
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # marks the error as retrieved
