"""Run one of several controllers through its roles: standby, leader until superseded, standby again.

Over PostgreSQL the lease decides. Over SQLite, which belongs to one machine, a controller leads at once, and ends when
it is superseded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass

from sqlalchemy import Engine
from starlette.types import Receive, Scope, Send

from everstep.clock import Clock
from everstep.errors import Unavailable
from everstep_controller.api import web_page
from everstep_controller.app.controller import Controller, MakeRemediator
from everstep_controller.app.standby import StandbyApp
from everstep_controller.auth.credentials import Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.config import ControllerSettings
from everstep_controller.leadership.lease_candidate import ElectedState, LeaseCandidate
from everstep_controller.leadership.takeover_gate import TakeoverGate
from everstep_controller.runtime import startup_state
from everstep_controller.runtime.startup_state import NO_RECORDS
from everstep_controller.store import table_access
from everstep_controller.store.database import engine_of, parse_url
from everstep_controller.store.database_errors import LeadershipLost, LeaseResigned
from everstep_controller.store.threads import DatabaseStore

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ControllerReplica:
    """The process's ASGI application in either role. Run ``run``, and cancel it for an orderly end."""

    settings: ControllerSettings
    keyring: Keyring
    clock: Clock
    make_remediator: MakeRemediator
    _: KW_ONLY
    database: InitVar[str]  # URL of the database, with the password
    address: str = ""  # where others reach this controller, ``http://HOST:PORT``; empty if they cannot
    provider: IdentityProvider | None = None  # of the people who may log in

    def __post_init__(self, database: str) -> None:
        self._url = parse_url(database)
        self._candidate: LeaseCandidate | None = None
        self._controller: Controller | None = None
        self._known_records = NO_RECORDS
        self._resigned = False
        web_page.openapi_file()
        self.standby = StandbyApp(self.settings, self.keyring, self.clock, self._leader, self.provider)
        self.leader_known = asyncio.Event()
        self.takeover_gate = TakeoverGate()
        self.on_leadership_lost: Callable[[], None] = lambda: None  # called at the end: all connections are void

    def leading(self) -> Controller | None:
        """Return the controller while this process is certain to lead, else None."""
        controller = self._controller
        if controller is None or (controller.tenure is not None and not controller.tenure.is_certain()):
            return None
        return controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        controller = self.leading()
        await (controller.app if controller is not None else self.standby)(scope, receive, send)

    async def run(self) -> None:
        """Run until cancelled. After any error the process must end at once, without waiting for its threads."""
        while True:
            await self._term()

    def close_connections(self) -> None:
        """Close sessions and streams, so that the server can stop."""
        if self._controller is not None:
            self._controller.close_connections()

    def _leader(self) -> str:
        seen = self._candidate.leader if self._candidate is not None else None
        return seen.address if seen is not None else ""

    def _engine(self) -> Engine:
        return engine_of(self._url, most_idle_s=self.settings.leadership.lease_s, name=self.settings.process.name)

    async def _term(self) -> None:
        """Run one term: stand by, lead, and step down."""
        settings = self.settings
        store = DatabaseStore(self._engine(), commit_timeout_s=settings.transactions.commit_timeout_s)
        if self._url.drivername == "sqlite":
            await self._lead(store, ElectedState(await store.take_over()))
            return
        candidate = self._candidate = LeaseCandidate(
            self._engine(),
            self.clock,
            name=settings.process.name,
            address=self.address,
            lease_s=settings.leadership.lease_s,
            renew_s=settings.leadership.lease_renew_s,
            takeover_gate=self.takeover_gate,
            contacts=self.standby.start(),
            resigned_before=self._resigned,
        )
        try:
            watching = asyncio.create_task(self._watch(candidate, store))
            try:
                won = await candidate.wait_for_lease(store, lambda: self._known_records)
            finally:
                watching.cancel()
                self._known_records = NO_RECORDS
            self._resigned = False
            await self._lead(store, won, candidate)
        except LeadershipLost as error:
            log.warning("stepping down: %s", error)
            self._resigned = isinstance(error, LeaseResigned)
            await self._leave(store, candidate)
        except asyncio.CancelledError:
            await self._leave(store, candidate)
            raise

    async def _watch(self, candidate: LeaseCandidate, store: DatabaseStore) -> None:
        """While standing by, refresh the credentials for the metrics and the records that a leader starts from."""
        await candidate.first_look_done.wait()
        self.leader_known.set()
        while True:
            with contextlib.suppress(Unavailable):
                self.standby.update_credentials(await store.query(table_access.load_credentials))
                read_changes = functools.partial(startup_state.read_records, known=self._known_records)
                self._known_records = await store.query(read_changes)
            await asyncio.sleep(self.settings.leadership.lease_s)

    async def _lead(self, store: DatabaseStore, won: ElectedState, candidate: LeaseCandidate | None = None) -> None:
        """Lead until an error. After LeadershipLost the process stands by again."""
        try:
            controller = await Controller.lead(
                self.settings, self.keyring, store, won, self.clock, self.make_remediator, self.provider
            )
            self._controller, self._candidate = controller, None
            self.leader_known.set()
        finally:
            self.takeover_gate.open()
        loaded = won.loaded
        nodes = len(loaded.nodes) + len(loaded.unchanged)
        log.info("leading: epoch %d, %d nodes, %d jobs", loaded.epoch, nodes, len(loaded.jobs))
        try:
            await self._until_over(controller, candidate)
        except (LeadershipLost, asyncio.CancelledError):
            self._controller = None
            self.on_leadership_lost()
            await controller.stop()
            raise

    async def _leave(self, store: DatabaseStore, candidate: LeaseCandidate) -> None:
        await asyncio.to_thread(store.close)
        await candidate.close()

    async def _until_over(self, controller: Controller, candidate: LeaseCandidate | None) -> None:
        """Wait for the first error of the loop, the lease, remediation or the epoch check, and raise it."""
        assert controller.loop_task is not None
        tasks: set[asyncio.Future[None]] = {controller.loop_task, controller.remediation.failure}
        if candidate is not None and controller.tenure is not None:
            check = controller.standby_watch.check
            renewing = candidate.renew_until_lost(controller.loop.epoch, controller.tenure, check)
            tasks.add(asyncio.create_task(renewing, name="lease"))
        if controller.epoch_check is not None:
            tasks.add(asyncio.create_task(controller.epoch_check.wait_superseded(), name="doubt"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks - {controller.loop_task, controller.remediation.failure}:
                task.cancel()
