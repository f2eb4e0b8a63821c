"""Assemble a controller from its store, state, event loop and routes: one instance per process and event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from everstep import __version__
from everstep.clock import Clock
from everstep_controller.api import endpoints, login, routes, web_page
from everstep_controller.api.admission import LIMITS, AdmissionControl
from everstep_controller.api.history import HistoryRoutes
from everstep_controller.api.job_output import OutputReader
from everstep_controller.api.operators import CredentialRoutes, OperatorRoutes, PolicyRoutes
from everstep_controller.api.stream import EventFeed, StreamReservations
from everstep_controller.auth.authenticator import Authenticator
from everstep_controller.auth.credentials import CredentialStore, Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.config import ControllerSettings
from everstep_controller.core import engine
from everstep_controller.core.state import FleetState
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep_controller.journal.recorder import Journal
from everstep_controller.leadership.leader_checks import EpochCheck, StandbyMonitor
from everstep_controller.leadership.lease_candidate import ElectedState
from everstep_controller.policy.rulebook import with_rules
from everstep_controller.read_models import fleet_views
from everstep_controller.read_models.fleet_views import ProgressRecorder, ReadModels
from everstep_controller.read_models.otlp_traces import TraceExporter
from everstep_controller.read_models.prometheus import FleetCollector, Metrics
from everstep_controller.read_models.recovery_spans import RecoverySpanBuilder
from everstep_controller.remediation.remediator import Remediator
from everstep_controller.remediation.service import RemediationService
from everstep_controller.runtime import startup_state
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.clock import ClockMonitor, SteadyTime, clock_set_back_s
from everstep_controller.runtime.intake import Urgency
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.rate_limits import EventQuota, run_suppressed_reports
from everstep_controller.runtime.transaction import EventNumbers
from everstep_controller.server import connections
from everstep_controller.server.agent_service import AgentService, SerialQueue
from everstep_controller.store import table_access
from everstep_controller.store.database_errors import DatabaseOutage
from everstep_controller.store.retention import RetentionLimits, run_retention
from everstep_controller.store.rows import EventLogRow, LoadedState
from everstep_controller.store.threads import DatabaseStore

MakeRemediator = Callable[[], Remediator]
"""Makes the remediator that acts on nodes; called once per leadership."""


class Controller:
    """All parts of one running controller. Create it with ``lead``, and end it with ``stop``.

    If ``loop_task`` ends by itself, a transaction failed and the process must end too.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        keyring: Keyring,
        store: DatabaseStore,
        elected: ElectedState,
        state: FleetState,
        clock: Clock,
        make_remediator: MakeRemediator,
        provider: IdentityProvider | None = None,
    ) -> None:
        loaded, _, tenure = elected
        self.tenure = tenure
        self._settings = settings
        self._keyring = keyring
        self._provider = provider
        self._clock = clock
        self.epoch_check = EpochCheck(tenure, keyring, clock, loaded.epoch) if tenure is not None else None
        self.metrics = Metrics(urgencies=Urgency, request_limits=LIMITS)
        self.feed = EventFeed(loaded.newest_event)
        otlp_endpoint = settings.notifications.otlp_endpoint
        self._traces = TraceExporter(otlp_endpoint, settings.process.name) if otlp_endpoint else None
        self._spans = RecoverySpanBuilder(self._traces.export) if self._traces is not None else None
        self.outbox = Outbox(loaded.epoch, loaded.outbox)
        self.store = store
        self.journal = _open_journal(settings)
        self.steady = SteadyTime(clock, loaded.newest_at)
        self.quota = EventQuota(
            settings.retention.events_per_node_burst,
            settings.retention.events_per_node_per_s,
            self.metrics.events_suppressed.inc,
        )
        self.loop = self._fleet_loop(state, loaded)
        self.remediation = RemediationService(settings, make_remediator(), self.loop, loaded, store)
        self.view_context = self._view_context(state, loaded.epoch)
        self.progress = ProgressRecorder(state, self.loop.now)
        self.output = OutputReader(settings.launcher_state_dir)
        self.standby_watch = StandbyMonitor(settings, self.loop, clock)
        self._gauges = FleetCollector(self.view_context, self.metrics, self.loop.read_models)
        self.metrics.registry.register(self._gauges)
        self.credentials = CredentialStore(loaded.credentials)
        gate = Authenticator(settings, keyring, self.credentials, state.jobs, clock, self.loop.now, provider)
        self.authenticator = gate
        self.agent_service = AgentService(
            loop=self.loop,
            requests=AgentRequests(self.loop, self.metrics, loaded.acknowledged_reports, loaded.poisoned),
            metrics=self.metrics,
            clock=clock,
            descriptors=connections.process_descriptors(),
            defer=SerialQueue(),
            name=settings.process.name,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            charge_reports=gate.limits.charge_reports,
            epoch_check=self.epoch_check,
        )
        self.app = self._operator_app(gate)
        self.loop_task: asyncio.Task[None] | None = None
        self.background: list[asyncio.Task[None]] = []

    def _fleet_loop(self, state: FleetState, loaded: LoadedState) -> FleetLoop:
        settings = self._settings
        return FleetLoop(
            state=state,
            outbox=self.outbox,
            commit=self.store.commit,
            clock=self.steady,
            metrics=self.metrics,
            event_numbers=EventNumbers(loaded.newest_event),
            read_models=ReadModels(state.jobs.values()),
            on_events=self._publish_events,
            on_remediations=lambda rows: self.remediation.executor.enqueue(rows),
            decide=self.journal.decide if self.journal else engine.handle,
            quota=self.quota,
            epoch=loaded.epoch,
            check_leading=self.tenure.check if self.tenure is not None else lambda: None,
            max_batch=settings.transactions.max_commit_batch,
            queue_limit=settings.transactions.queue_limit,
            outage_buffer_bytes=settings.transactions.outage_buffer_bytes,
        )

    def _view_context(self, state: FleetState, epoch: int) -> fleet_views.ViewContext:
        return fleet_views.ViewContext(
            state=state,
            outbox=self.outbox,
            epoch=epoch,
            started_at=self.loop.now(),
            now=self.loop.now,
            lag_s=self.loop.lag.recent_s,
            queued=self.loop.queued,
            newest_event=lambda: self.feed.newest,
            database_outage=self.database_outage,
            open_remediations=self.remediation.executor.open_count,
            journal_gaps=lambda: self.journal.gaps if self.journal is not None else 0,
            standby_report=lambda: self.standby_watch.report,
            clock_ahead_s=self.steady.ahead_s,
        )

    @classmethod
    async def lead(
        cls,
        settings: ControllerSettings,
        keyring: Keyring,
        store: DatabaseStore,
        elected: ElectedState,
        clock: Clock,
        make_remediator: MakeRemediator,
        provider: IdentityProvider | None = None,
    ) -> Controller:
        """Restore the state loaded from a database that was taken over, and handle the first event.

        ``provider``: of the people who may log in. Requests may be served when this method returns. Raises the errors
        of the database.
        """
        rules = with_rules(settings.policy)
        wall = clock.wall()
        if clock_set_back_s(wall, elected.loaded.newest_at, trust_clock=settings.clock.trust_clock):
            moved, batch = await asyncio.to_thread(
                startup_state.set_times_back, elected.loaded, elected.known_records, wall
            )
            await store.commit(batch)
            await store.write(lambda connection: startup_state.clamp_history(connection, wall))
            elected = elected._replace(loaded=moved, known_records=startup_state.NO_RECORDS)
        # Runs in a thread so that the event loop still answers.
        state = await asyncio.to_thread(startup_state.restore_state, rules, elected.loaded, elected.known_records)
        controller = cls(settings, keyring, store, elected, state, clock, make_remediator, provider)
        task = controller.loop_task = asyncio.create_task(controller.loop.run(), name="fleet loop")
        started = asyncio.create_task(controller.loop.started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if task.done():
            if controller.journal is not None:
                await asyncio.to_thread(controller.journal.close)
            store.close()
            await task
        controller.remediation.start()
        watch = ClockMonitor(controller.steady, lambda now: store.write(lambda held: table_access.mark(held, now)))
        controller.background = [
            asyncio.create_task(run_retention(store, controller.retention_limits), name="retention"),
            asyncio.create_task(watch.run(), name="clock"),
            asyncio.create_task(controller.progress.run(), name="progress history"),
            asyncio.create_task(
                run_suppressed_reports(controller.loop.submit, controller.quota), name="suppressed events"
            ),
        ]
        return controller

    def retention_limits(self) -> RetentionLimits:
        """Return the current retention limits. Of two clocks that differ, use the one that deletes less."""
        retention = self._settings.retention
        return RetentionLimits(
            since=min(self.loop.now(), self._clock.wall()) - retention.retention_days * 86400,
            events=retention.retention_max_events,
            orders=retention.retention_max_events_by_people,
            rows=retention.retention_max_history_rows,
            generations=retention.retention_generations_per_job,
        )

    def database_outage(self) -> DatabaseOutage | None:
        """Return the current outage: the database cannot be written, or the lease cannot be renewed."""
        outage = self.loop.database_outage()
        if outage is None and self.epoch_check is not None:
            return self.epoch_check.database_outage(self.loop.now())
        return outage

    def close_connections(self) -> None:
        """Close sessions and streams, so that the server can stop."""
        self.outbox.close()
        self.feed.close()

    async def stop(self) -> None:
        """End the loop, wait for pending writes, and close the database."""
        self.close_connections()
        tasks = {task for task in (self.loop_task, *self.background) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.remediation.stop()
        self.output.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)
        await asyncio.to_thread(self.store.close)

    def _publish_events(self, rows: list[EventLogRow]) -> None:
        self.feed.publish(rows)
        if self._spans is not None:
            self._spans.record(rows)

    def is_serving(self) -> bool:
        """Return whether the loop still runs."""
        return self.loop_task is not None and not self.loop_task.done()

    def _operator_app(self, gate: Authenticator) -> FastAPI:
        """Build the FastAPI application. Agents' routes stay outside because FastAPI costs 8 us per request."""
        app = FastAPI(title="Everstep controller", version=__version__, openapi_url=None, redirect_slashes=False)
        endpoints.install_error_handlers(app, self.metrics)
        settings, limits = self._settings, self._settings.request_limits
        admission = AdmissionControl(
            max_requests=limits.max_concurrent_requests,
            max_bytes=limits.max_unsent_answer_bytes,
            loop_share=limits.operator_event_loop_share,
            monotonic=self._clock.monotonic,
            on_refused=self.metrics.over_limit,
        )
        app.add_middleware(endpoints.StrangerSlices, slices=admission.slices, is_known=gate.is_known)
        readers = StreamReservations()
        self.metrics.watch(admission, readers)
        on_cut = self.metrics.streams_cut.inc
        history = HistoryRoutes(self.view_context, self.store, self.feed, gate, admission, readers, on_cut)
        app.add_api_route(routes.PLAIN_ROUTES["stream"].path, history.stream, methods=["GET"], include_in_schema=False)
        operators = OperatorRoutes(self.view_context, self.loop, self.store, self.progress, self.output)
        drain = self.journal.drain if self.journal is not None else None
        trials = PolicyTrialRunner(settings.journal.journal_dir, drain)
        policies = PolicyRoutes(self.view_context, trials, settings.policy_origins)
        for table, handlers in (
            (routes.OPERATOR_ROUTES, operators),
            (routes.HISTORY_ROUTES, history),
            (routes.POLICY_ROUTES, policies),
            (routes.CREDENTIAL_ROUTES, CredentialRoutes(self.loop, self.credentials)),
        ):
            endpoints.install_routes(app, gate, admission, table, handlers)
        self._open_routes(app, gate, admission)
        login.install(app, self._provider, self._keyring, self._clock, self.loop.now, self.metrics.count_refused)
        web_page.install(app)
        return app

    def _open_routes(self, app: FastAPI, gate: Authenticator, admission: AdmissionControl) -> None:
        @app.api_route("/healthz", methods=endpoints.READING, include_in_schema=False)
        async def health(_request: Request) -> Response:
            return Response(b'{"ok":true,"role":"controller"}', media_type="application/json")

        @app.api_route("/readyz", methods=endpoints.READING, include_in_schema=False)
        async def ready(_request: Request) -> Response:
            ok, outage = self.is_serving(), self.database_outage()
            body: dict[str, object] = {"ok": ok, "role": "controller"}
            if self.epoch_check is not None:
                body |= self.epoch_check.proof_fields()
            if outage is not None:  # still ready: running jobs need this controller, and no other could do more
                body["database"] = "unavailable"
            return Response(msgspec.json.encode(body), status_code=200 if ok else 503, media_type="application/json")

        @app.api_route("/metrics", methods=endpoints.READING, include_in_schema=False)
        async def metrics(request: Request) -> Response:
            identity = await endpoints.authorize(gate, routes.PLAIN_ROUTES["metrics"].access, request)

            async def shown() -> Response:
                await self._gauges.refresh(lambda: endpoints.yield_to_agents(request))
                return Response(self.metrics.render(self.view_context.state.jobs), media_type=CONTENT_TYPE_LATEST)

            return await endpoints.run_admitted(admission, identity, request, shown)


def _open_journal(settings: ControllerSettings) -> Journal | None:
    if not settings.journal.journal_dir:
        return None
    keep_s = settings.journal.journal_days * 86400.0
    return Journal(Path(settings.journal.journal_dir), max_bytes=settings.journal.journal_bytes, keep_s=keep_s)
