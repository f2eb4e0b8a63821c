"""Answer queries about the past: events, findings, verdicts, checkpoints, remediations and generations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from sqlalchemy import Connection

from everstep.bearer_tokens import Identity
from everstep.errors import MalformedMessage, NotFound
from everstep.ids import Version
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.operator_history import Evidence
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.api import endpoints, stream
from everstep_controller.api.admission import AdmissionControl, identity_key
from everstep_controller.api.routes import PLAIN_ROUTES
from everstep_controller.auth.authenticator import Authenticator
from everstep_controller.core.health.offences import collect_evidence
from everstep_controller.read_models import fleet_views
from everstep_controller.server import responses
from everstep_controller.store import reader
from everstep_controller.store.reader import EventPage
from everstep_controller.store.table_access import PREFIXES
from everstep_controller.store.threads import DatabaseStore

T = TypeVar("T")

DEFAULT_PAGE_SIZE = 100
VERDICTS_IN_EVIDENCE = 100


def page_size(query: dict[str, str], default: int = DEFAULT_PAGE_SIZE) -> int:
    """Return ``?limit=``, clipped to its bounds."""
    return max(1, min(responses.int_parameter(query, "limit", default), fleet_views.MAX_PAGE_SIZE))


def bool_parameter(query: dict[str, str], name: str) -> bool | None:
    """Return a boolean query parameter that ``endpoints`` has checked, or None if it is missing."""
    return msgspec.convert(query[name], bool, strict=False) if name in query else None


@dataclass(eq=False)
class HistoryRoutes:
    """Handlers of ``everstep_controller.api.routes.HISTORY_ROUTES``, by name."""

    context: fleet_views.ViewContext
    store: DatabaseStore
    feed: stream.EventFeed
    authenticator: Authenticator
    admission: AdmissionControl
    readers: stream.StreamReservations
    on_stream_cut: Callable[[], None]

    async def events(self, request: Request, _who: Identity) -> op.EventList:
        query = responses.parse_query(request.scope)
        return await self._events(query, (query["kind"],) if query.get("kind") else ())

    async def orders(self, request: Request, _who: Identity) -> op.EventList:
        return await self._events(responses.parse_query(request.scope), PREFIXES)

    async def _events(self, query: dict[str, str], kinds: tuple[str, ...]) -> op.EventList:
        after, limit = responses.int_parameter(query, "after", 0), page_size(query)

        def read(connection: Connection) -> list[op.Event]:
            newest = bool(bool_parameter(query, "newest"))
            wanted: dict[str, Any] = {name: query[name] for name in ("trace", "node", "job") if name in query}
            wanted |= {name: float(query[name]) for name in ("since", "until") if name in query}
            rows = reader.events(connection, after=after, limit=limit, kinds=kinds, newest=newest, **wanted)
            return list(map(stream.event_of, rows))

        events = await self.store.query(read)
        return op.EventList(events=tuple(events), next_after=events[-1].id if events else after)

    async def stream(self, request: Request) -> Response:
        """Send server-sent events after ``Last-Event-ID`` (or ``?after=``); without either, from now on."""
        who = await endpoints.authorize(self.authenticator, PLAIN_ROUTES["stream"].access, request)
        endpoints.check_parameters(PLAIN_ROUTES["stream"], request)
        after = responses.int_parameter(responses.parse_query(request.scope), "after", self.feed.newest)
        if "last-event-id" in request.headers:
            after = _last_seen(request.headers["last-event-id"])

        async def read(seen: int) -> EventPage:
            found = await self.store.query(lambda connection: reader.events_after(connection, seen, stream.FRAME_ROWS))
            # Even a reader of the whole past must not keep agents waiting.
            await self.admission.slices.take(identity_key(who))
            return found

        frames, reservation = stream.event_frames(self.feed, after, read), self.readers.reserve(who)
        return stream.EventStream(frames, reservation, self.on_stream_cut, lambda: self.authenticator.is_valid(who))

    # --- pages

    async def findings(self, request: Request, _who: Identity) -> operator_history.FindingList:
        query = responses.parse_query(request.scope)
        is_active = ("cleared_at", bool_parameter(query, "active"))
        found, more = await self._page(query, reader.FINDINGS, _finding, "node", "kind", is_null=is_active)
        return operator_history.FindingList(findings=found, next=more)

    async def verdicts(self, request: Request, _who: Identity) -> operator_history.VerdictList:
        query = responses.parse_query(request.scope)
        found, more = await self._page(query, reader.VERDICTS, lambda row: _verdict(row["doc"]), "node", "decision")
        return operator_history.VerdictList(verdicts=found, next=more)

    async def verdict(self, request: Request, _who: Identity) -> Verdict:
        verdict = request.path_params["verdict"]
        doc = await self.store.query(lambda connection: reader.find_verdict(connection, verdict))
        if doc is None:
            raise NotFound(f"no verdict {verdict!r}: `everstep verdicts` lists them")
        return _verdict(doc)

    async def checkpoints(self, request: Request, _who: Identity) -> operator_history.CheckpointList:
        query = responses.parse_query(request.scope)
        verified = bool_parameter(query, "verified")
        is_null = ("verified_at", None if verified is None else not verified)
        found, more = await self._page(query, reader.CHECKPOINTS, _checkpoint, "job", is_null=is_null)
        return operator_history.CheckpointList(checkpoints=found, next=more)

    async def remediations(self, request: Request, _who: Identity) -> operator_history.RemediationList:
        query = responses.parse_query(request.scope)
        state = query.get("remediation_state", "")
        found, more = await self._page(query, reader.REMEDIATIONS, _remediation, "node", state=state)
        return operator_history.RemediationList(remediations=found, next=more)

    async def generations(self, request: Request, _who: Identity) -> op.GenerationList:
        query = responses.parse_query(request.scope)
        found, more = await self._page(query, reader.GENERATIONS, _generation, "job")
        return op.GenerationList(generations=found[::-1], next=more)

    async def _page(
        self,
        query: dict[str, str],
        history: reader.HistoryList,
        to_message: Callable[[dict[str, Any]], T],
        *names: str,
        **wanted: Any,
    ) -> tuple[tuple[T, ...], str]:
        """Return a page as messages, and the next page's cursor. ``names`` are parameters that name a column."""
        limit, cursor = page_size(query), query.get("cursor", "")
        wanted |= {name: query.get(name, "") for name in names}

        def read(connection: Connection) -> tuple[tuple[T, ...], str]:
            rows, more = reader.list_page(connection, history, cursor, limit, **wanted)
            return tuple(map(to_message, rows)), more

        return await self.store.query(read)

    async def evidence(self, request: Request, _who: Identity) -> Evidence:
        node = request.path_params["node"]
        self.context.node(node)
        docs = await self.store.query(lambda connection: reader.newest_verdicts(connection, node, VERDICTS_IN_EVIDENCE))
        await endpoints.yield_to_agents(request)
        return collect_evidence(self.context.state, node, self.context.now(), list(map(_verdict, docs)))


def _last_seen(header: str) -> int:
    try:
        return responses.int_parameter({"after": header}, "after")
    except MalformedMessage:
        raise MalformedMessage(f"Last-Event-ID must be the number of an event, not {header[:100]!r}") from None


def _finding(row: dict[str, Any]) -> operator_history.FindingRecord:
    found = msgspec.json.decode(row["doc"], type=Finding)
    return operator_history.FindingRecord(
        id=row["id"], node=row["node"], finding=found, raised_at=row["at"], cleared_at=row["cleared_at"]
    )


def _checkpoint(row: dict[str, Any]) -> operator_history.Checkpoint:
    return operator_history.Checkpoint(version=Version(row.pop("generation"), row.pop("step")), **row)


def _verdict(doc: str) -> Verdict:
    return msgspec.json.decode(doc, type=Verdict)


def _generation(row: dict[str, Any]) -> GenerationSpec:
    return msgspec.structs.replace(msgspec.json.decode(row["doc"], type=GenerationSpec), secret="")


class _RemediationDetails(msgspec.Struct):
    """The fields of a remediation that only its document has."""

    sentence: str = ""
    verdict_id: str = ""
    trace: str = ""


def _remediation(row: dict[str, Any]) -> operator_history.RemediationStatus:
    more = msgspec.json.decode(row.pop("doc"), type=_RemediationDetails)
    return operator_history.RemediationStatus(**row, sentence=more.sentence, verdict=more.verdict_id, trace=more.trace)
