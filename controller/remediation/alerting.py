"""Posts the picture of alerts when it changes, and again now and then.

What is posted for the first time is in the database before, and leaves it once its end was taken by the receiver: a
controller that follows tells the end of what it finds there. Ends may be told twice, and are never left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from controller.core.state import FleetState
from controller.remediation.alerts import Alert, alerts_of, posts
from controller.remediation.boundary import guarded
from controller.remediation.receiver import Receiver
from controller.store.records import AlertRow
from controller.store.trouble import StoreAway
from everstep.errors import Unavailable

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks at what stands wrong."""
REPEAT_S = 300.0
"""Seconds after which a picture that has not changed is posted again, while anything stands wrong."""
RETRY_S = 10.0
"""Seconds after a post that failed until the picture of then is tried."""

Write = Callable[[list[AlertRow], list[str]], Awaitable[None]]
"""Stores alerts and deletes those of the fingerprints, durable on return. Raises Superseded, StoreAway, and
SQLAlchemy's errors."""


class Alerting:
    """Watches ``state`` until cancelled.

    Args:
        url: an Alertmanager-compatible receiver. Raises ConfigurationError for anything but http and https.
        token: sent as a bearer token; empty for none.
        controller: this controller's URL, for people who want to look.
        told: what earlier lives may have told, and not the end of it.
        check_leading: raises Unavailable where this controller may not be sure that it leads: what stood when it was
            stopped may be over, and another has said so.
        failed: called for each post that failed.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        controller: str,
        state: FleetState,
        now: Callable[[], float],
        write: Write,
        told: Iterable[Alert] = (),
        check_leading: Callable[[], None] = lambda: None,
        failed: Callable[[], None],
    ) -> None:
        self._receiver = Receiver(url, "a receiver of alerts")
        self._token = token
        self._controller = controller
        self._state = state
        self._now = now
        self._write = write
        self._check_leading = check_leading
        self._failed = failed
        self._told = {alert.fingerprint: alert for alert in told}
        self._stored = {name: alert.since for name, alert in self._told.items()}
        self._due = 0.0
        self._failing = False

    async def run(self) -> None:
        """Looks and posts until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look, and a post where one is due."""
        now = self._now()
        firing = {alert.fingerprint: alert for alert in alerts_of(self._state, now)}
        resolved = [alert for name, alert in self._told.items() if name not in firing]
        changed = bool(resolved) or not firing.keys() <= self._told.keys()
        due = now >= self._due or (changed and not self._failing)
        if due:
            self._told |= firing  # before it is known whether they were taken: no answer is no refusal
        try:
            await self._remember()
            if due and (firing or resolved):
                await self._tell(list(firing.values()), resolved, now)
                await self._remember()
        except Unavailable as error:
            log.warning("alerts were not taken: %s", error)
            self._failed()
            self._failing, self._due = True, now + RETRY_S

    async def _tell(self, firing: list[Alert], resolved: list[Alert], now: float) -> None:
        """Posts the picture. Raises Unavailable at the first post that is not taken."""
        for post in posts(firing, resolved, now, self._controller):
            self._check_leading()
            await asyncio.to_thread(guarded, self._post, post.body)
            for name in post.over:
                del self._told[name]
        self._failing, self._due = False, now + REPEAT_S

    async def _remember(self) -> None:
        """Brings the database up to date. While it cannot be written alerts are told all the same, and kept later.
        Raises Unavailable where another controller leads."""
        begun = [alert for name, alert in self._told.items() if self._stored.get(name) != alert.since]
        over = [name for name in self._stored if name not in self._told]
        if self._state.store_away or not (begun or over):
            return
        rows = [AlertRow(fingerprint=one.fingerprint, doc=msgspec.json.encode(one).decode()) for one in begun]
        try:
            await self._write(rows, over)
        except (StoreAway, SQLAlchemyError) as error:
            log.warning("alerts that were told are not kept for the next controller yet: %s", error)
            return
        self._stored = {name: alert.since for name, alert in self._told.items()}

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        status, _ = self._receiver.ask("POST", headers, body)
        if status >= 300:
            raise Unavailable(f"{self._receiver.host} answered {status}")
