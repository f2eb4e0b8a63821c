"""The demonstration's view of its fleet when some of its requests fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.client import Call, Client
from everstep.errors import Unavailable
from everstep.wire.v1.operator import Event, EventList, NodeList
from examples.demo.watch import Watch
from examples.demo.world import World, descendants, wait_for
from tests.support.processes.process_table import is_running

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


@pytest.mark.slow
def test_world_ends_all_descendant_processes(tmp_path: Path) -> None:
    child = "import subprocess, sys, signal; signal.signal(15, signal.SIG_IGN); subprocess.run(['sleep', '600'])"
    with World(tmp_path, []) as world:
        folder = world.folder
        process = world.start("stubborn", ["-c", child])
        wait_for(lambda: len(descendants(process.pid)) == 2, "its child")
        below = descendants(process.pid)
    wait_for(lambda: not any(map(is_running, below)), "the end of both")
    assert not folder.exists()


def test_world_secrets_are_owner_only(tmp_path: Path) -> None:
    with World(tmp_path, []) as world:
        assert world.secret_file.stat().st_mode & 0o777 == 0o600
        assert world.folder.stat().st_mode & 0o777 == 0o700
