"""The controller put together: store, state, loop, routes. One instance per process, on one event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import Engine

from everstep import __version__
from everstep.clock import Clock
from everstep_controller.api import endpoints, openapi
from everstep_controller.api.admission import Admission
from everstep_controller.api.auth import Gate
from everstep_controller.api.credentials import Credentials, Keyring
from everstep_controller.api.history import HistoryRoutes
from everstep_controller.api.operators import CredentialRoutes, OperatorRoutes, PolicyRoutes
from everstep_controller.api.routes import CREDENTIALS, HISTORY, OPERATOR, PLAIN, POLICY
from everstep_controller.api.stream import AuditFeed, Readers
from everstep_controller.config import ControllerSettings
from everstep_controller.core import engine as fleet
from everstep_controller.core.state import FleetState
from everstep_controller.journal.recorder import Journal
from everstep_controller.leadership.leader_checks import Doubt, Elsewhere
from everstep_controller.leadership.lease import Tenure
from everstep_controller.read_models import fleet_views
from everstep_controller.read_models.fleet_views import Boards
from everstep_controller.read_models.prometheus import FleetCollector, Metrics
from everstep_controller.remediation.remediator import Remediator
from everstep_controller.remediation.service import Outside
from everstep_controller.rulebook import with_rules
from everstep_controller.runtime.clock import SteadyTime
from everstep_controller.runtime.clock_check import ClockWatch, set_back_s
from everstep_controller.runtime.commit_buffer import Absence
from everstep_controller.runtime.event_quota import EventQuota, telling
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.startup_state import NOTHING, Known, restored
from everstep_controller.runtime.transaction import AuditNumbers
from everstep_controller.server import connections
from everstep_controller.server.agent_service import AgentDesk, OneByOne
from everstep_controller.store import table_access
from everstep_controller.store.retention import Keep, retaining
from everstep_controller.store.rows import Loaded
from everstep_controller.store.set_back import clamp_history, set_back
from everstep_controller.store.threads import Store


def _journal(settings: ControllerSettings) -> Journal | None:
    if not settings.journal_dir:
        return None
    keep_s = settings.journal_days * 86400.0
    return Journal(Path(settings.journal_dir), most_bytes=settings.journal_bytes, keep_s=keep_s)


async def _set_back(store: Store, loaded: Loaded, known: Known, wall: float) -> tuple[Loaded, Known]:
    """Sets the times of the database back to the wall clock, in the database first."""
    moved, batch = await asyncio.to_thread(set_back, loaded, known, wall)
    await store.commit(batch)
    await store.write(lambda connection: clamp_history(connection, wall))
    return moved, NOTHING


document = functools.cache(openapi.document)
"""The description of all routes; 70 ms, which a standby spends before anybody waits for it."""

MakeRemediator = Callable[[], Remediator]
"""Makes what acts on nodes; called once for each time that this controller leads."""


class Controller:
    """Everything that one running controller consists of. Make it with ``start``, end it with ``stop``.

    Attributes:
        app: the ASGI application: agents' routes in front, FastAPI behind.
        task: the loop; when it ends by itself, a transaction failed and the process must end too.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        keyring: Keyring,
        store: Store,
        loaded: Loaded,
        state: FleetState,
        clock: Clock,
        make_remediator: MakeRemediator,
        tenure: Tenure | None = None,
    ) -> None:
        self._tenure = tenure
        self._settings = settings
        self._clock = clock
        self.doubt = Doubt(tenure, keyring, clock, loaded.epoch) if tenure is not None else None
        self.metrics = Metrics()
        self.feed = AuditFeed(loaded.newest_audit)
        self.outbox = Outbox(loaded.epoch, loaded.outbox)
        self.store = store
        self._journal_dir = settings.journal_dir
        self.journal = _journal(settings)
        numbers = AuditNumbers(loaded.newest_audit)
        self.steady = SteadyTime(clock, loaded.newest_at)
        self.quota = EventQuota(
            settings.node_events_burst, settings.node_events_per_s, self.metrics.events_suppressed.inc
        )
        self.loop = FleetLoop(
            state=state,
            outbox=self.outbox,
            commit=store.commit,
            steady=self.steady,
            metrics=self.metrics,
            numbers=numbers,
            boards=Boards(state.jobs.values()),
            on_audit=self.feed.publish,
            on_remedies=lambda rows: self.outside.desk.requested(rows),
            decide=self.journal.decide if self.journal else fleet.handle,
            quota=self.quota,
            epoch=loaded.epoch,
            check_leading=tenure.check if tenure is not None else lambda: None,
            group=settings.group_commit,
            queue_limit=settings.queue_limit,
            away_limit_bytes=settings.away_limit_bytes,
        )
        self.outside = Outside(
            settings,
            make_remediator(),
            loop=self.loop,
            state=state,
            loaded=loaded,
            write_alerts=lambda told, over: store.write(
                lambda connection: table_access.write_alerts(connection, told, over)
            ),
            failed=self.metrics.remediation_failures.inc,
        )
        self.desk = fleet_views.Desk(
            state=state,
            outbox=self.outbox,
            epoch=loaded.epoch,
            started_at=self.loop.now(),
            now=self.loop.now,
            lag_s=self.loop.lag.recent_s,
            queued=self.loop.queued,
            newest_event=lambda: self.feed.newest,
            away=self.away,
            remedies_open=self.outside.desk.open,
            journal_gaps=lambda: self.journal.gaps if self.journal is not None else 0,
            elsewhere=lambda: self.elsewhere.told,
            clock_ahead_s=self.steady.ahead_s,
        )
        self.elsewhere = Elsewhere(settings, self.loop, clock)
        self._gauges = FleetCollector(self.desk)
        self.metrics.registry.register(self._gauges)
        self.credentials = Credentials(loaded.credentials)
        gate = Gate.of(settings, keyring, self.credentials, state.jobs, clock, self.loop.now)
        self.gate = gate
        self.agents = AgentDesk(
            loop=self.loop,
            metrics=self.metrics,
            clock=clock,
            descriptors=connections.of_this_process(),
            soon=OneByOne(),
            name=settings.name,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            marks=loaded.marks,
            poisoned=loaded.poisoned,
            charge_reports=gate.reports,
            doubt=self.doubt,
        )
        self.app = self._operators(gate)
        self.task: asyncio.Task[None] | None = None
        self.background: list[asyncio.Task[None]] = []

    @classmethod
    async def lead(
        cls,
        settings: ControllerSettings,
        keyring: Keyring,
        store: Store,
        loaded: Loaded,
        known: Known,
        clock: Clock,
        make_remediator: MakeRemediator,
        tenure: Tenure | None = None,
    ) -> Controller:
        """Restores what was loaded from a database that was taken over, and runs the first event.

        ``known``: the records that ``loaded`` leaves out.

        Raises what the database raises. When it returns, requests may be served.
        """
        rules = with_rules(settings.policy)
        if set_back_s(clock.wall(), loaded.newest_at, trust_clock=settings.trust_clock):
            loaded, known = await _set_back(store, loaded, known, clock.wall())
        state = await asyncio.to_thread(restored, rules, loaded, known)  # who comes meanwhile is heard
        controller = cls(settings, keyring, store, loaded, state, clock, make_remediator, tenure)
        task = controller.task = asyncio.create_task(controller.loop.run(), name="fleet loop")
        started = asyncio.create_task(controller.loop.started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if task.done():
            if controller.journal is not None:
                await asyncio.to_thread(controller.journal.close)
            store.close()
            await task
        controller.outside.start()
        watch = ClockWatch(controller.steady, lambda now: store.write(lambda held: table_access.mark(held, now)))
        controller.background = [
            asyncio.create_task(retaining(store, controller.keep), name="retention"),
            asyncio.create_task(watch.run(), name="clock"),
            asyncio.create_task(telling(controller.loop.submit, controller.quota), name="suppressed events"),
        ]
        return controller

    @classmethod
    async def start(
        cls,
        settings: ControllerSettings,
        keyring: Keyring,
        engine: Engine,
        clock: Clock,
        make_remediator: MakeRemediator,
    ) -> Controller:
        """Takes a database over that no other controller shares, and leads. Raises as ``lead``."""
        store = Store(engine, commit_timeout_s=settings.commit_timeout_s)
        return await cls.lead(settings, keyring, store, await store.take_over(), NOTHING, clock, make_remediator)

    def keep(self) -> Keep:
        """What history stays, as of now. Of two clocks that differ, the one that deletes less counts."""
        settings = self._settings
        return Keep(
            since=min(self.loop.now(), self._clock.wall()) - settings.retention_days * 86400,
            events=settings.retention_events,
            orders=settings.retention_orders,
            rows=settings.retention_rows,
            generations=settings.retention_generations,
        )

    def away(self) -> Absence | None:
        """The database's absence: nothing can be written, or the lease not be renewed."""
        away = self.loop.away()
        return away if away is not None or self.doubt is None else self.doubt.absence(self.loop.now())

    def certain(self) -> bool:
        """Whether it may answer as the leader now."""
        return self._tenure is None or self._tenure.certain()

    def release(self) -> None:
        """Ends sessions and streams, so that the server can stop."""
        self.outbox.close()
        self.feed.close()

    async def stop(self) -> None:
        """Ends the loop and closes the database, once what is being written has been."""
        self.release()
        tasks = {task for task in (self.task, *self.background) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.outside.stop()
        if self.journal is not None:
            await asyncio.to_thread(self.journal.close)
        await asyncio.to_thread(self.store.close)

    def serving(self) -> bool:
        """Whether the loop still runs."""
        return self.task is not None and not self.task.done()

    def _operators(self, gate: Gate) -> FastAPI:
        """Everything but the agents' routes, which stand in front of it: FastAPI costs 8 us a request."""
        app = FastAPI(
            title="Everstep controller", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        app.openapi = document  # type: ignore[method-assign]
        endpoints.install_error_handlers(app, self.metrics)
        settings = self._settings
        admission = Admission(
            most=settings.requests_under_way,
            most_bytes=settings.answer_bytes,
            share=settings.answering_share,
            monotonic=self._clock.monotonic,
            refused=self.metrics.over_limit,
        )
        self.metrics.watch_requests(admission)
        readers = Readers()
        self.metrics.watch_streams(readers)
        past = HistoryRoutes(
            desk=self.desk,
            store=self.store,
            feed=self.feed,
            gate=gate,
            admission=admission,
            readers=readers,
            cut=self.metrics.streams_cut.inc,
        )
        app.add_api_route(PLAIN["stream"].path, past.stream, methods=["GET"], include_in_schema=False)
        endpoints.install_routes(
            app, gate, admission, OPERATOR, OperatorRoutes(desk=self.desk, loop=self.loop, store=self.store)
        )
        endpoints.install_routes(app, gate, admission, HISTORY, past)
        endpoints.install_routes(
            app, gate, admission, POLICY, PolicyRoutes(self.desk, self._journal_dir, self._flush_journal)
        )
        endpoints.install_routes(
            app, gate, admission, CREDENTIALS, CredentialRoutes(loop=self.loop, credentials=self.credentials)
        )
        self._open_routes(app, gate, admission)
        return app

    async def _flush_journal(self) -> None:
        if self.journal is not None:
            await self.journal.drained()

    def _open_routes(self, app: FastAPI, gate: Gate, admission: Admission) -> None:
        async def health(_request: Request) -> Response:
            return Response(b'{"ok":true,"role":"controller"}', media_type="application/json")

        async def ready(_request: Request) -> Response:
            ok, away = self.serving(), self.away()
            body: dict[str, object] = {"ok": ok, "role": "controller"}
            if self.doubt is not None:
                body |= self.doubt.shown()
            if away is not None:  # still ready: running jobs need it, and no other controller could do more
                body["database"] = "away"
            return Response(msgspec.json.encode(body), status_code=200 if ok else 503, media_type="application/json")

        async def metrics(request: Request) -> Response:
            identity = endpoints.admit(gate, PLAIN["metrics"].access, request)

            async def shown() -> Response:
                await self._gauges.look(lambda: endpoints.turn(request))
                return Response(self.metrics.exposition(self.desk.state.jobs), media_type=CONTENT_TYPE_LATEST)

            return await endpoints.placed(admission, identity, request, shown)

        paths: Iterable[tuple[str, Any]] = (("/healthz", health), ("/readyz", ready), ("/metrics", metrics))
        for path, endpoint in paths:
            app.add_api_route(path, endpoint, methods=endpoints.methods("GET"), include_in_schema=False)
