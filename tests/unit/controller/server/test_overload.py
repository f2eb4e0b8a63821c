"""Overload of a controller process: its refusals and their reasons, its counters, and its order of work.

The database is locked from outside for a moment, so that a transaction waits and the queue behind it fills.
"""

from __future__ import annotations

import http.client
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import FrameKind, FrameRefused, Heartbeat, NumberedReport, Reports, ReportsAnswer
from everstep.wire.v1.training import FindingRaised
from tests.support.fleet.controllers import LONG_SILENCES, OPERATOR, VIEWER, ControllerProcess, controller_process
from tests.support.fleet.session_client import AgentSession
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

ROOM = 4
"""Stimuli that may wait."""
LOCKABLE = f"queue_limit = {ROOM}\ncommit_timeout_s = 30.0\n"


@contextmanager
def controller(program_forks: ForkPool, folder: Path, settings: str) -> Iterator[ControllerProcess]:
    file = folder / "settings.toml"
    file.write_text(f"{settings}[policy.findings]\nburst_count = 1000000\n{LONG_SILENCES}")
    with controller_process(folder, program_forks, arguments=("--settings", str(file))) as process:
        yield process


@contextmanager
def locked(process: ControllerProcess) -> Iterator[None]:
    """Another program writes: no transaction comes to its end meanwhile."""
    with closing(sqlite3.connect(process.database.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def sessions(process: ControllerProcess, count: int) -> Iterator[list[AgentSession]]:
    """Agents that have registered and reported no findings."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            session = stack.enter_context(closing(AgentSession(process.listen, f"n{number}")))
            session.register()
            session.beat(findings=())
            made.append(session)
        yield made


def disk(severity: Severity) -> FindingRaised:
    """A report without consequences, so that the queue holds only a test's own messages."""
    finding = Finding(kind=FindingKind.HOST_DISK, subject="/", severity=severity, message="full", action=Action.NONE)
    return FindingRaised(finding=finding)


MILD, URGENT = disk(Severity.WARNING), disk(Severity.CRITICAL)


def measured(process: ControllerProcess, name: str) -> float:
    _, body = process.ask("GET", "/metrics", None, OPERATOR)
    found = re.search(rf"^everstep_controller_{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def shed(process: ControllerProcess, kind: str) -> float:
    return measured(process, f'requests_shed_total{{class="{kind}"}}')


def is_queue_depth(process: ControllerProcess, depth: int) -> bool:
    return measured(process, "queue_depth") == depth


def fill(process: ControllerProcess, reports: list[tuple[AgentSession, FindingRaised]], waiting: int) -> None:
    """Send each report, and wait until this number is queued, of which one is being written."""
    for left, (session, report) in reversed(list(enumerate(reversed(reports)))):
        session.send_reports(report)
        until(partial(is_queue_depth, process, waiting - left), "the queue to fill")


def refusal(process: ControllerProcess, method: str, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
    """Return the problem document of a refused request, with its status and retry time."""
    with closing(process.connection()) as connection:
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        answer: http.client.HTTPResponse = connection.getresponse()
        return {**json.loads(answer.read()), "status": answer.status, "retry_after": answer.headers["Retry-After"]}


def first_findings(process: ControllerProcess) -> dict[str, int]:
    """The id of the first finding of each node."""
    _, body = process.ask("GET", "/v1/events?kind=finding&limit=999", None, VIEWER)
    found: dict[str, int] = {}
    for event in msgspec.json.decode(body, type=op.EventList).events:
        found.setdefault(event.node, event.id)
    return found


@pytest.mark.promise("overload")
def test_overload_sheds_routine_before_urgent_reports(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller(program_forks, tmp_path, LOCKABLE) as process, sessions(process, 8) as opened:
        assert (shed(process, "routine"), shed(process, "urgent")) == (0, 0)
        with locked(process):
            fill(process, [(opened[0], URGENT)], 1)
            fill(process, [(session, MILD) for session in opened[1 : 1 + ROOM]], 1 + ROOM)
            opened[5].send_reports(MILD)
            refused = opened[5].answer(FrameRefused)
            assert (refused.frame_kind, refused.code) == (FrameKind.REPORTS, "unavailable")
            assert (refused.retry_after_s or 0) > 0
            assert f"{ROOM} requests wait already" in refused.message
            reports = Reports(incarnation=1, reports=(NumberedReport(number=1, body=MILD),))
            opened[6].send_frame(FrameKind.REPORTS, reports)
            assert opened[6].answer(FrameRefused).code == "unavailable"
            assert shed(process, "routine") == 2
            opened[7].send_reports(URGENT)
            given_up = opened[1].answer(FrameRefused)  # the oldest
            assert (given_up.frame_kind, given_up.code) == (FrameKind.REPORTS, "unavailable")
            assert (shed(process, "routine"), shed(process, "urgent")) == (3, 0)
        for session in (opened[0], opened[7], opened[2], opened[3], opened[4]):
            assert session.answer(ReportsAnswer).through == 1
        for session in (opened[1], opened[5]):  # what was refused is sent again, and lost nothing
            session.send_frame(FrameKind.REPORTS, reports)
            assert session.answer(ReportsAnswer).through == 1
        at = first_findings(process)
        assert at["n0"] < at["n7"] < min(at["n2"], at["n3"], at["n4"])
        assert "database is unavailable" not in process.log()


@pytest.mark.promise("overload")
def test_overload_refuses_urgent_reports_and_operators(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller(program_forks, tmp_path, LOCKABLE) as process, sessions(process, 6) as opened:
        with locked(process):
            fill(process, [(opened[0], URGENT)], 1)
            fill(process, [(session, URGENT) for session in opened[1 : 1 + ROOM]], 1 + ROOM)
            opened[5].send_reports(URGENT)
            assert opened[5].answer(FrameRefused).code == "unavailable"
            problem = refusal(process, "POST", "/v1/nodes/n5/hold", op.ReasonOnlyRequest(reason="a fan"), OPERATOR)
            assert (problem["status"], problem["code"], problem["retry_after"]) == (503, "unavailable", "1")
            assert "send this again" in problem["detail"]
            assert (shed(process, "routine"), shed(process, "urgent")) == (0, 2)
            answered, _ = process.ask("GET", "/v1/status", None, VIEWER)
            assert answered == 200
        assert [session.answer(ReportsAnswer).through for session in opened[: 1 + ROOM]] == [1] * (1 + ROOM)
        status, _ = process.ask("POST", "/v1/nodes/n5/hold", op.ReasonOnlyRequest(reason="a fan"), OPERATOR)
        assert status == 200
        assert "database is unavailable" not in process.log()


RATES = "agent_requests_per_s = 4.0\nrequests_per_s = 4.0\nrequest_burst_s = 5.0\n"
BURST = 20


@pytest.mark.promise("overload")
def test_rate_limit_answers_retry_after_in_http_and_session(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller(program_forks, tmp_path, RATES) as process, sessions(process, 1) as (session,):
        answers = [process.ask("GET", "/v1/status", None, VIEWER)[0] for _ in range(3 * BURST)]
        assert answers[:BURST] == [200] * BURST
        assert 429 in answers
        while (problem := refusal(process, "GET", "/v1/events?limit=1", None, VIEWER))["status"] != 429:
            pass
        assert (problem["code"], problem["retry_after"]) == ("rate_limited", "1")
        assert "too many requests of viewer vera: retry in" in problem["detail"]
        refused = beaten_until_refused(session)
        assert (refused.frame_kind, refused.code) == (FrameKind.HEARTBEAT, "rate_limited")
        assert 0 < (refused.retry_after_s or 0) <= 0.25
        report = Reports(incarnation=1, reports=(NumberedReport(number=1, body=MILD),))
        assert taken_in_the_end(session, report) == 1
        assert measured(process, 'requests_failed_total{code="rate_limited",route="session"}') >= 1
        assert measured(process, 'requests_failed_total{code="rate_limited",route="/v1/status"}') >= 1


def beaten_until_refused(session: AgentSession) -> FrameRefused:
    for seq in range(100, 100 + 10 * BURST):
        session.send_frame(FrameKind.HEARTBEAT, Heartbeat(incarnation=1, seq=seq, sent_at=0.0))
    while True:
        _, message = session.next_frame()
        if isinstance(message, FrameRefused):
            return message


def taken_in_the_end(session: AgentSession, report: Reports) -> int:
    """Sends it again when it may, as agents do, until it is taken."""
    while True:
        session.send_frame(FrameKind.REPORTS, report)
        while True:
            _, message = session.next_frame()
            if isinstance(message, ReportsAnswer):
                return message.through
            if isinstance(message, FrameRefused) and message.frame_kind == FrameKind.REPORTS:
                assert message.retry_after_s
                time.sleep(message.retry_after_s)
                break
