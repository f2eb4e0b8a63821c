"""Clients that request the event stream and never read: bounded memory, a cut connection, and no lost event."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from everstep.system_clock import SystemClock
from everstep_controller.api.stream import FRAME_BYTES, MAX_STREAMS_PER_IDENTITY
from everstep_controller.store.database import open_database
from everstep_controller.store.rows import Batch, EventLogRow
from everstep_controller.store.writer import DatabaseWriter
from tests.support.fleet.controllers import OPERATOR, VIEWER, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow

EVENTS = 12_000
LONG = "s" * 1024
"""With it events are more than the buffers of two sockets take (net.ipv4.tcp_wmem: 4 MiB)."""
DEADLINE_S = 60.0


@pytest.fixture
def process(program_forks: ForkPool, tmp_path: Path) -> Iterator[ControllerProcess]:
    """With a long past."""
    database = f"sqlite:///{tmp_path / 'controller.db'}"
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    now = SystemClock().wall()  # a start far after the newest time in the database is refused
    past = [EventLogRow(id=1 + i, at=now, kind="past", sentence=LONG) for i in range(EVENTS)]
    writer.commit([Batch(number=1, event_log=past)])
    writer.close()
    engine.dispose()
    with controller_process(tmp_path, program_forks, database=database) as process:
        yield process


def measured(process: ControllerProcess, name: str) -> float:
    _, body = process.ask("GET", "/metrics", None, OPERATOR)
    found = re.search(rf"^everstep_controller_{name} (\S+)$", body.decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def connections(process: ControllerProcess) -> int:
    """Descriptors of the process that are sockets."""
    assert process.process is not None
    count = 0
    for descriptor in Path(f"/proc/{process.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def ask_and_never_read(process: ControllerProcess) -> socket.socket:
    host, _, port = process.listen.rpartition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(DEADLINE_S)
    made.connect((host, int(port)))
    bearer = VIEWER["Authorization"]
    made.sendall(f"GET /v1/events/stream?after=0 HTTP/1.1\r\nHost: x\r\nAuthorization: {bearer}\r\n\r\n".encode())
    return made


def what_came(stuck: socket.socket) -> bytes:
    """All that was sent before the connection broke."""
    came = bytearray()
    try:
        while data := stuck.recv(1 << 16):
            came += data
    except ConnectionResetError:
        pass
    return bytes(came)


def ids(text: bytes) -> list[int]:
    """Of the events that are there whole."""
    return [int(number) for number in re.findall(rb"id: (\d+)\nevent: entry\ndata: [^\n]*\n\n", text)]


@pytest.mark.promise("slow-readers")
def test_stalled_stream_readers_are_bounded_and_cut_off(process: ControllerProcess) -> None:
    before = connections(process)
    stuck = [ask_and_never_read(process) for _ in range(MAX_STREAMS_PER_IDENTITY)]
    try:
        until(lambda: measured(process, "event_streams") == MAX_STREAMS_PER_IDENTITY, "the streams")
        with closing(process.connection()) as one_more:
            one_more.request("GET", "/v1/events/stream", headers=VIEWER)
            refused = one_more.getresponse()
            assert (refused.status, refused.headers["Retry-After"]) == (429, "10")
            problem = json.loads(refused.read())
            assert problem["code"] == "rate_limited"
            assert "reads 8 event streams already" in problem["detail"]
        with closing(process.connection()) as another:
            another.request("GET", "/v1/events/stream", headers=OPERATOR)
            assert another.getresponse().status == 200
        held: list[float] = []

        def all_cut() -> bool:
            held.append(measured(process, "event_streams_buffered_bytes"))
            return measured(process, "event_streams_cut_total") == MAX_STREAMS_PER_IDENTITY

        until(all_cut, "the readers to be cut off")
        assert 0 < max(held) <= (MAX_STREAMS_PER_IDENTITY + 1) * (FRAME_BYTES + 2 * len(LONG))
        until(lambda: connections(process) <= before, "the connections to be gone")
        assert (measured(process, "event_streams"), measured(process, "event_streams_buffered_bytes")) == (0, 0)
        seen = ids(what_came(stuck[0]))
    finally:
        for reader in stuck:
            reader.close()
    assert seen == list(range(1, len(seen) + 1))
    assert 0 < len(seen) < EVENTS
    assert resumed(process, seen[-1]) == list(range(seen[-1] + 1, EVENTS + 1))


def resumed(process: ControllerProcess, last: int) -> list[int]:
    """Ids up to the last of the past, for a reader that comes again after ``last``."""
    came = bytearray()
    with closing(process.connection(DEADLINE_S)) as stream:
        stream.request("GET", "/v1/events/stream", headers={**VIEWER, "Last-Event-ID": str(last)})
        response: http.client.HTTPResponse = stream.getresponse()
        while b"id: %d\n" % EVENTS not in came or not came.endswith(b"\n\n"):
            came += response.read1()
    return [number for number in ids(bytes(came)) if number <= EVENTS]
