"""What people ask of the rules: the policy in force, a change of it, what of the budget is left."""

from __future__ import annotations

from fastapi import Request

from controller import policy_change, views
from controller.api import endpoints, tags
from controller.trial import Flush, Trials
from everstep.tokens import Identity
from everstep.wire.v1 import history as past


class PolicyRoutes:
    """The handlers of ``controller.api.routes.POLICY``, by name.

    Args:
        journal: the directory that is kept, empty for none.
        flush: brings what was recorded to the disk.
    """

    def __init__(self, desk: views.Desk, journal: str, flush: Flush) -> None:
        self._desk = desk
        self._trials = Trials(journal, flush)

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
        return await self._trials.outcome(self._desk.state.policy, wanted, self._desk.now())

    def _check_tag(self, request: Request) -> None:
        endpoints.check_tag(request, lambda: tags.of_policy(self._desk.state.policy))

    async def budget(self, _request: Request, _who: Identity) -> endpoints.Tagged:
        status = views.budget_status(self._desk)
        return endpoints.Tagged(status, tags.tag_of(status))
