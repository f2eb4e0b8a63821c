"""``everstep events`` and ``everstep orders``: events of the fleet, and orders by people."""

from __future__ import annotations

import datetime
import re
import sys
from collections import deque
from typing import Annotated, Any

import typer

from everstep.cli import tables
from everstep.cli.context import Json, connected_client, console, error_console
from everstep.client import Client, PagedList
from everstep.client.exchange import PAGE_SIZE
from everstep.errors import ConfigurationError
from everstep.printable_text import printable_json
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import operator as op

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

Node = Annotated[str, typer.Option(help="Show only events about this node.")]
Job = Annotated[str, typer.Option(help="Show only events about this job.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Number of events: the newest.")]
Since = Annotated[str, typer.Option(metavar="TIME", help="Begin: 2h (ago), or 2026-11-20T12:00 (local time).")]
Until = Annotated[str, typer.Option(metavar="TIME", help="End, in the same forms.")]


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events until interrupted.")] = False,
    trace: Annotated[str, typer.Option(help="Show all consequences of one request or report.")] = "",
    node: Node = "",
    job: Job = "",
    kind: Annotated[str, typer.Option(help="Show only kinds with this prefix, such as verdict or node.lost.")] = "",
    since: Since = "",
    until: Until = "",
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List events and decisions, newest last."""
    wanted = {"trace": trace, "node": node, "job": job, "kind": kind}
    with connected_client(context) as client:
        newest = client.status().newest_event if follow else 0
        within: dict[str, Any] = wanted | _time_range(since, until)
        if trace or limit > PAGE_SIZE:
            found = _newest(client.events(**within), sys.maxsize if trace else limit)
        else:
            found = client.newest_events(limit, **within).events
        if trace and not as_json and not follow:
            console.print(tables.trace_table(found) if found else f"no events of trace {trace}")
            return
        for event in found:
            _print(event, as_json)
        if follow:
            _follow(client, max(newest, *(event.id for event in found), 0), as_json, **wanted)


def orders(
    context: typer.Context,
    node: Node = "",
    job: Job = "",
    since: Since = "",
    until: Until = "",
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List the orders of people and their reasons, newest last."""
    with connected_client(context) as client:
        within: dict[str, Any] = {"node": node, "job": job, **_time_range(since, until)}
        found = (
            client.newest_orders(limit, **within).events
            if limit <= PAGE_SIZE
            else _newest(client.orders(**within), limit)
        )
        for event in found:
            _print(event, as_json)


def parse_duration(text: str) -> float:
    """Return ``90s``, ``30m``, ``12h`` or ``30d`` in seconds. Raises ConfigurationError for other texts."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no duration: use 90s, 30m, 12h or 30d")
    return float(found[1]) * _UNITS[found[2]]


def parse_time(text: str) -> float:
    """Return the wall seconds of a time such as ``2h`` (ago) or ISO 8601, by default in this machine's time zone.
    Raises ConfigurationError for other texts."""
    if _DURATION.fullmatch(text):
        return SYSTEM_CLOCK.wall() - parse_duration(text)
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{text!r} is no time: use 90s, 30m, 2h or 7d (ago), or 2026-11-20T12:00") from error


def _time_range(since: str, until: str) -> dict[str, float]:
    return {name: parse_time(text) for name, text in (("since", since), ("until", until)) if text}


def _newest(found: PagedList[op.EventList, op.Event], limit: int) -> tuple[op.Event, ...]:
    """Return the newest ``limit`` of all events, oldest first; a page has the oldest ones."""
    return tuple(deque(found, maxlen=None if limit == sys.maxsize else limit))


def _print(event: op.Event, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(printable_json(event) + "\n")
        sys.stdout.flush()
    else:
        console.print(tables.event_line(event), soft_wrap=True)


def _follow(client: Client, after: int, as_json: bool, *, kind: str, **wanted: str) -> None:
    """Print new events, across restarts of the controller, until interrupted."""
    try:
        for event in client.follow(after):
            if isinstance(event, op.EventGap):
                error_console.print(event.sentence, soft_wrap=True)
                continue
            same = all(not text or getattr(event, name) == text for name, text in wanted.items())
            if same and event.kind.startswith(kind):
                _print(event, as_json)
    except KeyboardInterrupt:
        return
