"""What the demonstration sees of its fleet, when some of its questions fail."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.client import Call, Client
from everstep.errors import Unavailable
from everstep.wire.v1.operator import Event, EventList, NodeList
from examples.demo.watch import Watch

EVICTED = Event(id=7, at=1.0, kind="verdict.evict", sentence="n1 is out", node="n1")


def test_watch_keeps_events_after_a_failed_request() -> None:
    failing, asked = [True], []

    class Played(Client):
        def send(self, call: Call[Any]) -> Any:
            asked.append(call.target)
            if call.path == "/v1/events":
                new = call.query["after"] == 0
                return EventList(events=(EVICTED,) if new else (), next_after=7)
            if failing.pop() if failing else False:
                raise Unavailable("busy")
            return NodeList(nodes=(), total=0)

    seen: list[Event] = []
    watch = Watch(lambda: Played("http://c:1"), "demo", seen.append)
    with pytest.raises(Unavailable):
        watch._poll()
    watch._poll()
    watch._poll()
    assert seen == watch.events == [EVICTED]
    assert asked[-2] == "/v1/events?limit=500&after=7"
