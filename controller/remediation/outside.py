"""Everything that a leading controller does towards the outside: remedies, a look at the scheduler, alerts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec

from controller.config import ControllerSettings, read_password
from controller.core.events import NodeObserved
from controller.core.state import FleetState
from controller.loop import FleetLoop
from controller.remediation.alerting import Alerting, Write
from controller.remediation.alerts import maybe_told
from controller.remediation.base import Remediator
from controller.remediation.desk import RemedyDesk
from controller.remediation.observer import Observer
from controller.store.records import Loaded
from controller.transaction import Transaction, new_trace


class Outside:
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
        loaded: Loaded,
        write_alerts: Write,
        failed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self.desk = RemedyDesk(
            remediator,
            submit=loop.submit,
            now=loop.now,
            uniform=random.random,
            check_leading=loop.check_leading,
            failed=failed,
            watch=self._watch,
            rows=loaded.remedies,
        )
        self._observer = Observer(remediator, state, self._tell, failed, self.desk.settled)
        self._alerting = None
        if settings.alert_url:
            self._alerting = Alerting(
                settings.alert_url,
                token=read_password(settings.alert_token_file) if settings.alert_token_file else "",
                controller=f"{'https' if settings.tls_certificate else 'http'}://{settings.name}",
                state=state,
                now=loop.now,
                write=write_alerts,
                told=maybe_told(loaded),
                check_leading=loop.check_leading,
                failed=failed,
            )
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _tell(self, event: NodeObserved) -> None:
        def stimulus(tx: Transaction, now: float) -> None:
            tx.handle(msgspec.structs.replace(event, trace=trace), now)

        trace = new_trace()
        await self._loop.submit(stimulus)

    def start(self) -> None:
        """Call once the loop runs."""
        self.desk.start()
        self._tasks = [asyncio.create_task(self._observer.run(), name="observer")]
        if self._alerting is not None:
            self._tasks.append(asyncio.create_task(self._alerting.run(), name="alerting"))
        for task in self._tasks:
            self._watch(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.ended.done():
            self.ended.set_exception(error)

    async def stop(self) -> None:
        """Leaves what is under way to the next life."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.desk.stop()
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # heard, whoever waited for it
