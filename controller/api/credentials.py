"""The handlers of ``controller.api.routes.CREDENTIALS``, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from controller.api.endpoints import body
from controller.credentials import Credentials, Order, shown
from controller.loop import FleetLoop
from controller.transaction import Transaction, new_trace
from everstep.errors import Unavailable
from everstep.tokens import Identity
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op

log = logging.getLogger(__name__)
T = TypeVar("T")


class CredentialRoutes:
    """Enrolment, and the orders about credentials. Each is one stimulus: the change and its line in the audit log."""

    def __init__(self, *, loop: FleetLoop, credentials: Credentials) -> None:
        self._loop = loop
        self._credentials = credentials

    async def enrol(self, request: Request, who: Identity) -> wire.Enrolled:
        asked = await body(request, wire.Enrol)
        trace = new_trace()
        enrolled = await self._submit(lambda tx, now: self._credentials.enrol(asked, who, trace, tx, now))
        log.info("enrolled by join token %s", who.credential, extra={"node": asked.node, "trace": trace})
        return enrolled

    async def credentials(self, _request: Request, _who: Identity) -> wire.CredentialList:
        return wire.CredentialList(credentials=tuple(shown(row) for row in self._credentials.listed()))

    async def issue_credential(self, request: Request, who: Identity) -> wire.Issued:
        wanted = await body(request, wire.Issue)
        order = Order(who, wanted.reason, new_trace())
        return await self._submit(lambda tx, now: self._credentials.issue(wanted, order, tx, now))

    async def revoke_credential(self, request: Request, who: Identity) -> op.Changed:
        because = await body(request, op.Because)
        id, order = request.path_params["id"], Order(who, because.reason, new_trace())
        sentence = await self._submit(lambda tx, now: self._credentials.revoke(id, order, tx, now))
        return op.Changed(trace=order.trace, sentence=sentence)

    async def rotate_credential(self, request: Request, who: Identity) -> wire.Issued:
        wanted = await body(request, wire.Rotate)
        id, order = request.path_params["id"], Order(who, wanted.reason, new_trace())
        return await self._submit(lambda tx, now: self._credentials.rotate(id, wanted.grace_s, order, tx, now))

    async def _submit(self, change: Callable[[Transaction, float], T]) -> T:
        """Runs a change in the loop. Raises Unavailable while the database is away: it could not be promised."""

        def stimulus(tx: Transaction, now: float) -> T:
            if away := tx.state.store_away:
                raise Unavailable(f"credentials cannot be changed while the database is away: {away}")
            return change(tx, now)

        return await self._loop.submit(stimulus)
