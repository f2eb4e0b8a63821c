"""The agent's sessions with a controller, over real sockets to a stub in a thread that speaks the wire messages."""

from __future__ import annotations

import asyncio
import logging
import socket

import msgspec
import pytest

from everstep.errors import (
    EverstepError,
    MalformedMessage,
    NotFound,
    PermissionDenied,
    StaleGeneration,
    Unavailable,
    VersionMismatch,
)
from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Reports
from everstep.wire.v1.training import RankLost, VersionSealed
from tests.support.agents.controller_stub import DEADLINE_S, ControllerStub, serving
from tests.support.agents.uplinks import TOKEN, UplinkBench, lost, refuse_always, refuse_once, stop, until, until_nudged


def sealed(step: int) -> VersionSealed:
    return VersionSealed(job="j", at=0.0, generation=1, rank=0, version=Version(1, step), bytes=1, durable=True)


@pytest.mark.promise("report-order")
def test_urgent_report_overtakes_a_pending_report_answer(bench: UplinkBench, controller: ControllerStub) -> None:
    controller.unanswered.add("reports")

    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(sealed(1))
            await until(lambda: controller.taken_reports)
            line.uplink.report(sealed(2))
            line.uplink.report(lost())
            await until(lambda: len(controller.taken_reports) >= 3)
            line.uplink.report(lost(1))
            beats = len(controller.heartbeats)
            await until(lambda: len(controller.heartbeats) >= beats + 3)
            assert [report.number for report in controller.taken_reports] == [1, 2, 3], (
                "two requests are under way, and no more"
            )
            assert len(line.spool) == 4, "no answer, nothing is forgotten"

    asyncio.run(story())


@pytest.mark.promise("reports-survive")
def test_reports_wait_for_an_absent_controller_and_arrive_once(
    bench: UplinkBench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.stop()
            for rank in range(3):
                line.uplink.report(lost(rank))
            await until(lambda: line.uplink.outcomes["session", "unavailable"] >= 2)
            assert len(line.spool) == 3
            controller.start()
            await until(lambda: not len(line.spool))
            assert [n.body for n in controller.taken_reports] == [lost(0), lost(1), lost(2)]
            assert len(controller.registered) == 1

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    away = [r for r in caplog.records if "no controller reachable" in r.message]
    assert len(away) == 1
    assert any("is reachable again" in r.message for r in caplog.records)


@pytest.mark.parametrize("fault", ["unknown_node", "stale", "acknowledge"])
@pytest.mark.slow
def test_controller_losing_its_state_gets_everything_again(
    bench: UplinkBench, controller: ControllerStub, fault: str
) -> None:
    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            finding = Finding(kind=FindingKind.GPU_LOST, subject="g", severity=Severity.CRITICAL, message="m")
            await until(lambda: line.node.registrations)
            line.node.seen = (finding,)
            await until(lambda: any(b.findings for b in controller.heartbeats))
            if fault == "unknown_node":
                controller.forget()
            elif fault == "stale":
                refuse_once(controller, "heartbeat", StaleGeneration("an older life"))
            else:
                refuse_once(controller, "acknowledge", NotFound("who?"))
                controller.push(stop())
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].findings == (finding,)
            line.uplink.report(lost())
            await until(lambda: controller.taken_reports)

    asyncio.run(story())


def test_change_of_the_vaults_address_is_registered(bench: UplinkBench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.node.vault = "127.0.0.1:9999"
            line.uplink.beat_now()
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].vault == "127.0.0.1:9999"

    asyncio.run(story())


def test_refused_report_does_not_stop_the_others(
    bench: UplinkBench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: bytes) -> None:
        reports = msgspec.json.decode(body, type=Reports).reports
        if any(n.body == lost(3) for n in reports):
            raise MalformedMessage("one of these is not understood")

    controller.refusals["reports"] = refuse

    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            for rank in range(8):
                line.uplink.report(lost(rank))
            await until(lambda: not len(line.spool))
            assert [n.body for n in controller.taken_reports] == [lost(r) for r in range(8) if r != 3]
            assert line.spool.refused_count == 1

    asyncio.run(story())
    assert any("dropped refused report 4 (RankLost)" in r.message for r in caplog.records)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionDenied("not your node"), "needs a token of role agent"),
        (VersionMismatch("1 and 2"), "upgrade the older side"),
        (StaleGeneration("a larger incarnation is known"), "another agent runs as node n1"),
    ],
)
def test_permanent_refusal_is_logged_once_with_advice(
    bench: UplinkBench, controller: ControllerStub, caplog: pytest.LogCaptureFixture, error: EverstepError, advice: str
) -> None:
    refuse_always(controller, "register", error)

    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: line.uplink.outcomes["register", error.code])
            await until_nudged(line, lambda: line.uplink.outcomes["register", error.code] >= 2)
            assert line.node.registrations == 0

    asyncio.run(story())
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert advice in errors[0]


def test_wrong_token_is_logged_and_a_renewed_file_is_read(
    bench: UplinkBench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    bench.token_file.write_text("agent:n1:old")

    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: line.uplink.outcomes["session", "unauthenticated"])
            bench.token_file.write_text(TOKEN)
            await until_nudged(line, lambda: line.node.registrations)

    asyncio.run(story())
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert "everstep-controller token --role agent --subject n1" in errors[0]
    assert "agent:n1:old" not in caplog.text


@pytest.mark.parametrize(
    "text", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"x" * 20000]
)
def test_non_controller_endpoint_is_rejected(bench: UplinkBench, text: bytes) -> None:
    async def story() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(text)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with bench.running_uplink(f"http://127.0.0.1:{port}") as line:
                await until(lambda: line.uplink.outcomes["session", "protocol"] >= 2)
                assert line.node.registrations == 0

    asyncio.run(story())


def test_internal_error_ends_the_session_and_not_the_uplink(
    bench: UplinkBench, controller: ControllerStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with bench.running_uplink(controller.url) as line:
            await until(lambda: controller.heartbeats)
            with monkeypatch.context() as broken:
                broken.setattr(line.node, "rank_progress", lambda: 1 // 0)
                await until(lambda: "ZeroDivisionError" in caplog.text)
            beats = len(controller.heartbeats)
            await until(lambda: len(controller.heartbeats) >= beats + 2)

    asyncio.run(story())


def test_ending_agent_hands_over_its_last_reports(bench: UplinkBench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.running_uplink(controller.url, report_batch_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(lost())
            assert await line.uplink.flush(DEADLINE_S)
            assert controller.reports(RankLost) == [lost()]
            controller.stop()
            line.uplink.report(lost(1))
            assert not await line.uplink.flush(0.01)

    asyncio.run(story())


def test_mute_controller_is_given_up(bench: UplinkBench, controller: ControllerStub) -> None:
    async def story(mute: socket.socket) -> None:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with bench.running_uplink(url, controller.url, connect_timeout_s=0.1) as line:
            await until(lambda: line.node.registrations)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(story(mute))


@pytest.mark.slow
def test_unresponsive_controller_is_left_for_the_next(bench: UplinkBench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.running_uplink(
            controller.url, second.url, answer_timeout_s=0.1, connect_timeout_s=0.1
        ) as line:
            await until(lambda: controller.heartbeats)
            controller.unanswered.add("heartbeat")
            await until(lambda: second.heartbeats)
            assert line.uplink.outcomes["heartbeat", "unavailable"] >= 1

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


@pytest.mark.parametrize("fault", ["session", "heartbeat"])
def test_standby_controller_sends_the_agent_to_the_next(
    bench: UplinkBench, controller: ControllerStub, fault: str
) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.running_uplink(controller.url, second.url) as line:
            await until(lambda: controller.heartbeats)
            refuse_always(controller, fault, Unavailable("another controller has the lease", DEADLINE_S))
            controller.drop()
            line.uplink.report(lost())
            await until(lambda: second.taken_reports)

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


def test_forbidding_controller_is_retried_slowly_among_others(bench: UplinkBench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        refuse_always(controller, "session", PermissionDenied("not your node"))
        refuse_always(second, "session", Unavailable("standing by", 0.0))
        async with bench.running_uplink(controller.url, second.url) as line:
            await until(lambda: line.uplink.outcomes["session", "unavailable"] >= 5)
            assert line.uplink.outcomes["session", "forbidden"] == 1

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))
