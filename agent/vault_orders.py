"""What the controller orders of the node's vault: versions to storage, parity of versions.

The controller says an order again until it hears what became of it, so nothing has to be remembered here: the same
order while it is carried out is passed over, and one that was carried out is asked of the vault again, which finds it
done. A vault that begins anew is asked again by its keeper.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from agent.vault_keeper import VaultKeeper
from everstep.clock import Clock
from everstep.errors import StaleGeneration
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from everstep.wire.v1.local import Failed
from everstep.wire.v1.parity import ParityGroup
from everstep.wire.v1.supervision import Protect, Protected, Spill, Spilled
from everstep.wire.v1.training import AnyReport
from everstep.wire.v1.vault_reports import VersionProtected, VersionSpilled

log = logging.getLogger(__name__)

GROUPS_AT_ONCE = 4
"""Groups of shards whose parity is asked for side by side: each reads from all of its members."""

Order = SpillVersion | ProtectVersion


class VaultOrders:
    """Of one agent's life, on its event loop.

    Args:
        report: what becomes of an order goes there.
    """

    def __init__(
        self,
        node: str,
        vault: VaultKeeper,
        report: Callable[[AnyReport], None],
        clock: Clock,
    ) -> None:
        self._node = node
        self._vault = vault
        self._report = report
        self._clock = clock
        self._running: dict[tuple[str, type[Order]], tuple[Order, asyncio.Task[None]]] = {}

    def take(self, order: Order) -> None:
        """Carries an order out, unless it is being carried out; a newer one of its kind takes its place.

        One of a job that the vault was not told of by this agent yet is left: it is said again.
        """
        key = order.job, type(order)
        before = self._running.get(key)
        if before is not None and before[0] == order:
            return
        if self._vault.generation_of(order.job) is None:
            return
        self._drop(key)
        self._running[key] = order, asyncio.ensure_future(self._carry_out(key, order))

    def forget(self, job: str) -> None:
        """The job is over."""
        for key in [key for key in self._running if key[0] == job]:
            self._drop(key)

    def close(self) -> None:
        """The agent ends; its vault goes on with what it was asked for."""
        for key in list(self._running):
            self._drop(key)

    def _drop(self, key: tuple[str, type[Order]]) -> None:
        _, task = self._running.pop(key, (None, None))
        if task is not None:
            task.cancel()

    async def _carry_out(self, key: tuple[str, type[Order]], order: Order) -> None:
        word = await (self._spill(order) if isinstance(order, SpillVersion) else self._protect(order))
        del self._running[key]  # cancelled, this is not reached: another order has the place
        if word.code:
            context = {"node": self._node, "job": order.job, "generation": order.generation}
            log.warning("%s of version %s: %s", type(order).__name__, order.version, word.message, extra=context)
        if word.code != StaleGeneration.code:  # it is said again in the newer generation's name
            self._report(word)

    async def _spill(self, order: SpillVersion) -> VersionSpilled:
        answer = await self._vault.ask(
            lambda number: Spill(
                request=number,
                job=order.job,
                generation=order.generation,
                version=order.version,
                url=order.url,
                writers=order.writers,
                keep=order.keep,
            )
        )
        said = partial(
            VersionSpilled, job=order.job, at=self._clock.wall(), version=order.version, attempt=order.attempt
        )
        if isinstance(answer, Spilled):
            url = f"{order.url}/{answer.folder}"
            return said(url=url, bytes=answer.bytes, whole=answer.whole, removed=answer.removed, left=answer.left)
        assert isinstance(answer, Failed)
        return said(code=answer.code, message=answer.message)

    async def _protect(self, order: ProtectVersion) -> VersionProtected:
        """All groups of the order, a few at a time; the first that cannot be made ends it."""
        said = partial(VersionProtected, job=order.job, at=self._clock.wall(), version=order.version)
        made: dict[int, str] = {}
        for first in range(0, len(order.groups), GROUPS_AT_ONCE):
            some = order.groups[first : first + GROUPS_AT_ONCE]
            answers = await asyncio.gather(*(self._protect_one(order, group) for group in some))
            for group, answer in zip(some, answers, strict=True):
                if isinstance(answer, Failed):
                    return said(made=made, code=answer.code, message=answer.message)
                made[group.group] = answer.members
        return said(made=made)

    async def _protect_one(self, order: ProtectVersion, group: ParityGroup) -> Protected | Failed:
        answer = await self._vault.ask(
            lambda number: Protect(
                request=number,
                job=order.job,
                generation=order.generation,
                version=order.version,
                group=group,
                keep=order.keep,
            )
        )
        assert isinstance(answer, Protected | Failed)
        return answer
