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
        self._ours: dict[str, str] = {}
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
        before = {} if self._state.store_away else self._cordoned()
        shown = await asyncio.to_thread(guarded, self._remediator.standing, nodes)
        for node in nodes:
            seen = shown.get(node, Standing())
            foreign = "" if seen.cordoned_by == MARK else seen.cordoned_by
            record = self._state.nodes.get(node)
            if record is None:
                continue
            gone = "" if seen.cordoned_by or node not in shown else self._gone(node, record.cordoned, before)
            if seen.cordoned_by == MARK and node in before:
                self._ours[node] = before[node]
            if gone or foreign != record.foreign:
                reason = seen.reason[:1024]
                await self._tell(NodeObserved(node=node, cordoned_by=foreign, reason=reason, uncordoned=gone))

    def _cordoned(self) -> dict[str, str]:
        """Nodes that Everstep has out of service with the scheduler, by the remedy that is not under way any more."""
        nodes = self._state.nodes.items()
        return {node: record.cordoned for node, record in nodes if record.cordoned and self._settled(node)}

    def _gone(self, node: str, cordoned: str, before: dict[str, str]) -> str:
        """The remedy whose cordon an earlier look has shown, and which stood in the records before this one and after;
        empty where there is none: what is only decided, or was never taken, is not gone."""
        return cordoned if cordoned and cordoned == before.get(node) == self._ours.get(node) else ""
