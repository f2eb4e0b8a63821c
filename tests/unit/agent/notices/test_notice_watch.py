"""Polls of a metadata service that answers wrongly or restarts, and withdrawn notices."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.vocabulary import Action, Finding
from everstep_agent.notices import metadata
from everstep_agent.notices.aws import AwsService
from everstep_agent.notices.azure import EVENTS_PATH, NAME_PATH, AzureService
from everstep_agent.notices.gcp import GcpService
from everstep_agent.notices.metadata import MetadataService
from everstep_agent.notices.notice import NoticeError
from everstep_agent.notices.watch import NoticeWatch
from tests.support.agents.fake_metadata import FakeMetadata, fake_metadata

SPOT = "/latest/meta-data/spot/instance-action"
EVENTS = "/latest/meta-data/events/maintenance/scheduled"
RECLAIM = (200, b'{"action": "terminate", "time": "2023-11-14T22:15:20Z"}')


@pytest.fixture
def cloud() -> Iterator[FakeMetadata]:
    with fake_metadata() as service:
        yield service


class Watched:
    """A watch with a clock, and its last report."""

    def __init__(self, service: MetadataService | None, run_dir: Path, boot: str = "boot-1") -> None:
        self.clock = ManualClock()
        self.findings: tuple[Finding, ...] = ()
        self.reports = 0
        (run_dir / "boot_id").write_text(boot)
        self.watch = NoticeWatch(service, run_dir, 5.0, 600.0, self.clock, self._take, run_dir / "boot_id")

    def _take(self, findings: tuple[Finding, ...]) -> None:
        self.findings, self.reports = findings, self.reports + 1

    def poll(self) -> list[str]:
        self.clock.advance(120.0)  # beyond any pause after a failure
        asyncio.run(self.watch.poll())
        return [finding.subject for finding in self.findings]


def test_aws_notice_comes_and_is_withdrawn(cloud: FakeMetadata, tmp_path: Path) -> None:
    watched = Watched(AwsService(cloud.url), tmp_path)
    assert watched.poll() == []
    cloud.answers[SPOT] = RECLAIM
    assert watched.poll() == ["aws/spot-instance-action"]
    watched.poll()
    assert watched.reports == 1
    del cloud.answers[SPOT]
    assert watched.poll() == []
    assert {headers.get("X-aws-ec2-metadata-token") for method, _, headers in cloud.requests if method == "GET"} == {
        "token-1"
    }


def test_aws_token_is_renewed_once_refused(cloud: FakeMetadata, tmp_path: Path) -> None:
    watched = Watched(AwsService(cloud.url), tmp_path)
    cloud.answers[SPOT] = (401, b"")
    watched.poll()
    cloud.answers |= {SPOT: RECLAIM, "/latest/api/token": (200, b"token-2")}
    assert watched.poll() == ["aws/spot-instance-action"]


@pytest.mark.parametrize(
    "answer",
    [(500, b""), (429, b"slow down"), (302, b""), (200, b"<html>"), (200, b"x" * (1 << 17)), (200, b"[]")],
    ids=["error", "too-many", "redirect", "garbage", "huge", "other-json"],
)
def test_bad_answer_leaves_notice_and_other_paths(
    answer: tuple[int, bytes], cloud: FakeMetadata, tmp_path: Path
) -> None:
    watched = Watched(AwsService(cloud.url), tmp_path)
    cloud.answers |= {SPOT: RECLAIM, EVENTS: (200, b"[]")}
    watched.poll()
    cloud.answers[SPOT] = answer
    event = b'[{"NotBefore": "21 Jan 2019 09:00:43 GMT", "Code": "system-reboot", "EventId": "e1", "State": "active"}]'
    cloud.answers[EVENTS] = (200, event)
    assert watched.poll() == ["aws/spot-instance-action", "aws/e1"]


def test_hung_service_costs_one_bounded_request(
    cloud: FakeMetadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "TIMEOUT_S", 0.05)
    cloud.answers = {"/latest/api/token": (0, b"")}
    watched = Watched(AwsService(cloud.url), tmp_path)
    assert watched.poll() == []
    asyncio.run(watched.watch.poll())  # at once, in the pause after the failure
    assert len(cloud.requests) == 1


def test_unreachable_service_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        watched = Watched(GcpService(f"http://127.0.0.1:{unused.getsockname()[1]}"), tmp_path)
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert watched.poll() == []
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_azure_asks_its_name_and_never_approves(cloud: FakeMetadata, tmp_path: Path) -> None:
    event = '{"EventId": "%s", "EventType": "Preempt", "Resources": ["%s"], "NotBefore": ""}'
    events = ", ".join(event % pair for pair in (("e1", "vm-7"), ("e2", "vm-8")))
    cloud.answers = {NAME_PATH: (200, b"vm-7"), EVENTS_PATH: (200, b'{"Events": [%s]}' % events.encode())}
    watched = Watched(AzureService(cloud.url), tmp_path)
    assert watched.poll() == ["azure/e1"]
    assert {method for method, _, _ in cloud.requests} == {"GET"}
    assert all(headers["Metadata"] == "true" for _, _, headers in cloud.requests)


def test_lead_is_measured_by_the_services_clock(cloud: FakeMetadata, tmp_path: Path) -> None:
    event = b'[{"NotBefore": "16 Nov 2023 22:13:20 GMT", "Code": "system-reboot", "EventId": "e1", "State": "active"}]'
    cloud.answers[EVENTS] = (200, event)
    watched = Watched(AwsService(cloud.url), tmp_path)  # this node's clock is two days behind
    actions = []
    for cloud.date in ("", "Thu, 16 Nov 2023 22:10:00 GMT"):
        watched.poll()
        actions.append(watched.findings[0].action)
    assert actions == [Action.NONE, Action.DRAIN]


def test_restarted_agent_reports_the_same_notice(cloud: FakeMetadata, tmp_path: Path) -> None:
    cloud.answers[SPOT] = RECLAIM
    first = Watched(AwsService(cloud.url), tmp_path)
    first.poll()
    again = Watched(AwsService(cloud.url), tmp_path)
    again.watch._publish()
    assert again.findings == first.findings
    assert Watched(AwsService(cloud.url), tmp_path, boot="boot-2").watch._notices == {}


def test_notice_file_is_read_without_any_service(tmp_path: Path) -> None:
    watched = Watched(None, tmp_path)
    (tmp_path / "notice.json").write_text('{"reason": "preStop", "deadline": 1700000200}')
    assert watched.poll() == ["file/notice.json"]
    (tmp_path / "notice.json").unlink()
    assert watched.poll() == []
    assert [path.name for path in tmp_path.iterdir()] == ["boot_id"]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nTRUE", b"TRUE"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nTRUE\r\n0\r\n\r\n", b"TRUE"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nTRUE", None),
        (b"HTTP/1.1 200", None),
        (b"SSH-2.0-OpenSSH_9.6\r\n", None),
    ],
    ids=["length", "chunked", "cut-off", "no-head", "no-http"],
)
def test_answer_is_read_from_a_connection_left_open(
    answer: bytes, body: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "TIMEOUT_S", 0.05)

    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()  # until the agent closes
        writer.close()
        closed.set()

    async def ask() -> bytes | None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                return (await metadata.fetch(f"http://127.0.0.1:{port}", "/", {})).body
            except NoticeError:
                return None
            finally:
                await closed.wait()

    assert asyncio.run(ask()) == body
