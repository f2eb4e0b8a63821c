"""What the demonstration sees of its fleet, when some of its questions fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.errors import Unavailable
from everstep.wire.v1.operator import Event, EventList, NodeList
from examples.demo.watch import Watch

EVICTED = Event(id=7, at=1.0, kind="verdict.evict", sentence="n1 is out", node="n1")


def test_watch_keeps_events_after_a_failed_request() -> None:
    failing, asked = [True], []

    def get(path: str, _kind: Any) -> Any:
        asked.append(path)
        if path.startswith("/v1/events"):
            new = path.endswith("after=0&limit=500")
            return EventList(events=(EVICTED,) if new else (), next_after=7)
        if failing.pop() if failing else False:
            raise Unavailable("busy")
        return NodeList(nodes=(), total=0)

    seen: list[Event] = []
    watch = Watch(lambda: SimpleNamespace(get=get), "demo", seen.append)  # type: ignore[arg-type, return-value]
    with pytest.raises(Unavailable):
        watch._poll()
    watch._poll()
    watch._poll()
    assert seen == watch.events == [EVICTED]
    assert asked[-2] == "/v1/events?after=7&limit=500"
