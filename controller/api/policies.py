"""What people ask of the rules: the policy in force, a change of it, what of the budget is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fastapi import Request

from controller import policy_change, views
from controller.api import endpoints, tags
from controller.what_if import WhatIf
from everstep.errors import Conflict
from everstep.tokens import Identity
from everstep.wire.v1 import history as past


class PolicyRoutes:
    """The handlers of ``controller.api.routes.POLICY``, by name.

    Args:
        journal: the directory that is kept, empty for none.
        flush: brings what was recorded to the disk.
    """

    def __init__(self, desk: views.Desk, journal: str, flush: Callable[[], None]) -> None:
        self._desk = desk
        self._journal = journal
        self._flush = flush
        self._trying = asyncio.Lock()

    async def policy(self, _request: Request, _who: Identity) -> endpoints.Tagged:
        policy = self._desk.state.policy
        return endpoints.Tagged(policy_change.document(policy), tags.of_policy(policy))

    async def check_policy(self, request: Request, _who: Identity) -> past.PolicyChecked:
        change = await endpoints.body(request, past.PolicyChange)
        self._check_tag(request)
        return policy_change.check(self._desk.state.policy, change)

    async def try_policy(self, request: Request, _who: Identity) -> past.Tried:
        wanted = await endpoints.body(request, past.TryPolicy)
        self._check_tag(request)
        policy_change.apply(self._desk.state.policy, wanted.change)
        if not self._journal:
            raise Conflict("nothing is recorded here: set journal_dir, and try the change on what comes from then on")
        if self._trying.locked():
            raise Conflict("another change is being tried: wait for its outcome")
        async with self._trying:
            self._flush()
            told = await self._apart(wanted)
        return _tried(told)

    def _check_tag(self, request: Request) -> None:
        endpoints.check_tag(request, lambda: tags.of_policy(self._desk.state.policy))

    async def _apart(self, wanted: past.TryPolicy) -> WhatIf:
        """In a process of its own: it is long work, and the loop has a fleet to look after."""
        since = self._desk.now() - wanted.hours * 3600.0
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            return await asyncio.get_running_loop().run_in_executor(
                pool, policy_change.dry_run, self._journal, self._desk.state.policy, wanted.change, since
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def budget(self, _request: Request, _who: Identity) -> endpoints.Tagged:
        status = views.budget_status(self._desk)
        return endpoints.Tagged(status, tags.tag_of(status))


def _tried(told: WhatIf) -> past.Tried:
    also, not_then = len(told.also), len(told.not_then)
    nodes = ", ".join(verdict.node for verdict in told.also[:20])
    sentence = f"it would have evicted {'once' if told.evictions == 1 else f'{told.evictions} times'}"
    sentence += f"; also {nodes}" if also else ""
    sentence += f"; {not_then} {'eviction' if not_then == 1 else 'evictions'} would not have been" if not_then else ""
    sentence = sentence if also or not_then else f"{sentence}, as happened"
    if told.gaps:
        hours = sum(end - begin for begin, end in told.gaps) / 3600.0
        sentence += f"; {hours:.1f} h of the time are not recorded here ({len(told.gaps)} gaps)"
    return past.Tried(
        since=told.since or 0.0,
        events=told.events,
        evictions=told.evictions,
        also=told.also[:1000],
        not_then=told.not_then[:1000],
        gaps=told.gaps[:1000],
        sentence=sentence,
    )
