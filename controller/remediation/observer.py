"""What the scheduler shows of nodes, looked at now and then; the core hears of every change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controller.core.events import NodeObserved
from controller.core.state import FleetState
from controller.remediation.base import MARK, Remediator, Standing
from controller.remediation.boundary import Unexpected, guarded
from everstep.errors import EverstepError

log = logging.getLogger(__name__)

OBSERVE_S = 15.0
"""Seconds between two looks: how long a person's cordon may go unnoticed."""

Tell = Callable[[NodeObserved], Awaitable[None]]
"""Hands an event to the loop."""


class Observer:
    """Asks the remediator for the standing of all nodes and tells what differs from the records.

    Args:
        failed: called for each look that failed unexpectedly.
        settled: whether nothing that was asked for at a node is still under way.
    """

    def __init__(
        self,
        remediator: Remediator,
        state: FleetState,
        tell: Tell,
        failed: Callable[[], None] = lambda: None,
        settled: Callable[[str], bool] = lambda node: True,
    ) -> None:
        self._settled = settled
        self._remediator = remediator
        self._state = state
        self._tell = tell
        self._failed = failed

    async def run(self, every_s: float = OBSERVE_S) -> None:
        """Looks until cancelled."""
        while True:
            try:
                await self.look()
            except EverstepError as error:  # it, or the database, is away: what changed is seen at the next look
                if isinstance(error, Unexpected):
                    self._failed()
                log.warning("what %s shows of the nodes could not be taken up: %s", self._remediator.name, error)
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """One look. Raises what the remediator, or the loop, raises."""
        nodes = list(self._state.nodes)
        ours = {node: record.cordoned for node, record in self._state.nodes.items() if self._settled(node)}
        shown = await asyncio.to_thread(guarded, self._remediator.standing, nodes)
        for node in nodes:
            seen = shown.get(node, Standing())
            foreign = "" if seen.cordoned_by == MARK else seen.cordoned_by
            record = self._state.nodes.get(node)
            if record is None:
                continue
            gone = ours.get(node, "") if node in shown and not seen.cordoned_by else ""
            gone = gone if gone == record.cordoned else ""  # it was asked for before the look
            if gone or foreign != record.foreign:
                reason = seen.reason[:1024]
                await self._tell(NodeObserved(node=node, cordoned_by=foreign, reason=reason, uncordoned=gone))
