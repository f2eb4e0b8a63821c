"""Posts the picture of alerts when it changes, and again now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from controller.core.state import FleetState
from controller.remediation.alerts import Alert, alerts_of, payload
from controller.remediation.receiver import Receiver
from everstep.errors import Unavailable

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks at what stands wrong."""
REPEAT_S = 300.0
"""Seconds after which a picture that has not changed is posted again, while anything stands wrong."""
RETRY_S = 10.0
"""Seconds after a post that failed until the picture of then is tried."""


class Alerting:
    """Watches ``state`` until cancelled.

    Args:
        url: an Alertmanager-compatible receiver. Raises ConfigurationError for anything but http and https.
        token: sent as a bearer token; empty for none.
        controller: this controller's URL, for people who want to look.
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
        failed: Callable[[], None],
    ) -> None:
        self._receiver = Receiver(url, "a receiver of alerts")
        self._token = token
        self._controller = controller
        self._state = state
        self._now = now
        self._failed = failed
        self._told: dict[str, Alert] = {}
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
        changed = firing.keys() != self._told.keys()
        if now < self._due and (self._failing or not changed):
            return
        if not firing and not changed:
            return
        body = payload(list(firing.values()), resolved, now, self._controller)
        try:
            await asyncio.to_thread(self._post, body)
        except Unavailable as error:
            log.warning("alerts were not taken: %s", error)
            self._failed()
            self._failing, self._due = True, now + RETRY_S
            return
        self._told, self._failing, self._due = firing, False, now + REPEAT_S

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        status, _ = self._receiver.ask("POST", headers, body)
        if status >= 300:
            raise Unavailable(f"{self._receiver.host} answered {status}")
