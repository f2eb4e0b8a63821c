"""Gaps in the event stream after a restore or retention, of which readers are told."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from everstep.cli.events import _follow
from everstep.client import Client
from everstep.wire.v1 import operator as op
from everstep_controller.store.database import back_up, open_database
from everstep_controller.store.retention import RetentionLimits, prune_events
from everstep_controller.store.table_access import EVENT_ID_GAP, RESTORED
from everstep_controller.store.writer import DatabaseWriter
from tests.support.fleet.controllers import VIEWER, ControllerProcess, controller_process, registration
from tests.support.fleet.session_client import send_message
from tests.support.processes.fork_pool import ForkPool


def register(process: ControllerProcess, node: str) -> None:
    status, answer = send_message(process, node, registration(node))
    assert status == 200, answer


def events(process: ControllerProcess) -> tuple[op.Event, ...]:
    """All of them, oldest first."""
    _, body = process.ask("GET", "/v1/events?limit=999", None, VIEWER)
    return msgspec.json.decode(body, type=op.EventList).events


def next_frame(response: http.client.HTTPResponse) -> dict[str, str]:
    """The next event of a stream: its fields by name."""
    while True:
        frame = {}
        while (line := response.readline().decode()) not in ("\n", ""):
            name, _, value = line.rstrip("\n").partition(": ")
            frame[name] = value
        if "event" in frame:
            return frame
        assert line, "the stream has ended"


@pytest.mark.promise("event-stream")
def test_restored_database_reuses_no_event_id(program_forks: ForkPool, tmp_path: Path) -> None:
    copied = tmp_path / "copy.db"
    with controller_process(tmp_path, program_forks) as process:
        register(process, "n1")
        back_up(process.database, copied)
        register(process, "n2")
        seen = events(process)
        process.kill()
        for file in tmp_path.glob("controller.db*"):
            file.unlink()
        shutil.move(copied, tmp_path / "controller.db")
        process.start()
        register(process, "n3")
        known = events(process)
        restored, *after = [event for event in known if event.id >= EVENT_ID_GAP]
        assert (restored.kind, restored.id) == (RESTORED, EVENT_ID_GAP)
        assert [event.node for event in after if event.kind == "node.registered"] == ["n3"]
        common = tuple(event for event in known if event.id < EVENT_ID_GAP)
        assert common == seen[: len(common)] != seen
        with closing(process.connection()) as stream:
            stream.request("GET", "/v1/events/stream", headers={**VIEWER, "Last-Event-ID": str(seen[-1].id)})
            response = stream.getresponse()
            while not (line := response.readline()).startswith(b"id: "):
                assert line
            assert line == b"id: %d\n" % EVENT_ID_GAP
        process.kill()
        process.start()  # one that follows in the ordinary way
        assert [event.id for event in events(process)][: len(known)] == [event.id for event in known]
        assert [event.kind for event in events(process)].count(RESTORED) == 1


@pytest.mark.promise("event-stream")
def test_stream_answers_unknown_event_id_with_gap(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller_process(tmp_path, program_forks) as process, closing(process.connection()) as stream:
        register(process, "n1")
        newest = events(process)[-1].id
        stream.request("GET", f"/v1/events/stream?after={newest + 500}", headers=VIEWER)
        response = stream.getresponse()
        frames = [next_frame(response)]
        register(process, "n2")
        frames.append(next_frame(response))
    gap = msgspec.json.decode(frames[0]["data"], type=op.EventGap)
    assert (frames[0]["event"], frames[0]["id"]) == ("gap", str(newest))
    assert (gap.after, gap.through, gap.reason) == (newest + 500, newest, "unknown")
    assert (frames[1]["event"], frames[1]["id"]) == ("entry", str(newest + 1))


def test_client_reports_gap_left_by_retention(program_forks: ForkPool, tmp_path: Path) -> None:
    """A single event of many is left; a reader that saw the first one learns of the gap."""
    with controller_process(tmp_path, program_forks) as process:
        for node in ("n1", "n2", "n3"):
            register(process, node)
        process.terminate()
        engine = open_database(process.database)
        writer = DatabaseWriter(engine)
        newest = writer.take_over().newest_event
        nothing = RetentionLimits(since=1e12, events=0, orders=9, rows=9, generations=9)
        writer.run(lambda connection: prune_events(connection, nothing))
        writer.close()
        engine.dispose()
        process.start()
        client = Client(process.url, VIEWER["Authorization"].removeprefix("Bearer "))
        with closing(client.stream(1)) as stream:
            gap = next(stream)
    assert isinstance(gap, op.EventGap)
    assert (gap.after, gap.through, gap.reason) == (1, newest - 1, "deleted")


def test_events_command_prints_gap_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int | None] = []

    class Played(Client):
        def stream(self, after: int | None = None) -> Generator[op.Event | op.EventGap, None, None]:
            asked.append(after)
            if len(asked) > 1:
                raise KeyboardInterrupt
            yield op.EventGap(after=3, through=7, reason="deleted", sentence="4 to 7 are gone")

    _follow(Played("http://c:1", ""), 3, True, kind="")
    assert asked == [3, 7]
    assert capsys.readouterr() == ("", "4 to 7 are gone\n")
