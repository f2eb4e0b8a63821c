"""The handlers of ``controller.api.routes.CREDENTIALS``, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from controller.api import asgi, endpoints
from controller.api.history import page_size
from controller.api.tags import tag_of
from controller.credentials import Credentials, Order, shown
from controller.loop import FleetLoop
from controller.transaction import Transaction, new_trace
from controller.views import LONGEST_PAGE
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
        asked = await endpoints.body(request, wire.Enrol)
        trace = new_trace()
        enrolled = await self._submit(lambda tx, now: self._credentials.enrol(asked, who, trace, tx, now))
        log.info("enrolled by join token %s", who.credential, extra={"node": asked.node, "trace": trace})
        return enrolled

    async def credentials(self, request: Request, _who: Identity) -> endpoints.Tagged:
        asked = asgi.query(request.scope)
        wanted = (asked.get("role", ""), asked.get("subject", ""), asked.get("cursor", ""))
        rows, more = self._credentials.page(*wanted, page_size(asked, LONGEST_PAGE))
        page = wire.CredentialList(credentials=tuple(map(shown, rows)), next=more)
        return endpoints.Tagged(page, self._tag_of_all())

    async def credential(self, request: Request, _who: Identity) -> endpoints.Tagged:
        credential = shown(self._credentials.get(request.path_params["id"]))
        return endpoints.Tagged(credential, tag_of(credential))

    async def issue_credential(self, request: Request, who: Identity) -> wire.Issued:
        wanted = await endpoints.body(request, wire.Issue)
        order = Order(who, wanted.reason, new_trace())

        def issue(tx: Transaction, now: float) -> wire.Issued:
            endpoints.check_tag(request, self._tag_of_all)
            return self._credentials.issue(wanted, order, tx, now)

        return await self._submit(issue)

    async def revoke_credential(self, request: Request, who: Identity) -> op.Changed:
        because = await endpoints.body(request, op.Because)
        id, order = request.path_params["id"], Order(who, because.reason, new_trace())

        def revoke(tx: Transaction, now: float) -> str:
            self._check_tag(request, id)
            return self._credentials.revoke(id, order, tx, now)

        return op.Changed(trace=order.trace, sentence=await self._submit(revoke))

    async def rotate_credential(self, request: Request, who: Identity) -> wire.Issued:
        wanted = await endpoints.body(request, wire.Rotate)
        id, order = request.path_params["id"], Order(who, wanted.reason, new_trace())

        def rotate(tx: Transaction, now: float) -> wire.Issued:
            self._check_tag(request, id)
            return self._credentials.rotate(id, wanted.grace_s, order, tx, now)

        return await self._submit(rotate)

    def _tag_of_all(self) -> str:
        return f'"{self._credentials.digest()}"'

    def _check_tag(self, request: Request, id: str) -> None:
        endpoints.check_tag(request, lambda: tag_of(shown(self._credentials.get(id))))

    async def _submit(self, change: Callable[[Transaction, float], T]) -> T:
        """Runs a change in the loop. Raises Unavailable while the database is away: it could not be promised."""

        def stimulus(tx: Transaction, now: float) -> T:
            if away := tx.state.store_away:
                raise Unavailable(f"credentials cannot be changed while the database is away: {away}")
            return change(tx, now)

        return await self._loop.submit(stimulus)
