"""The agent's sessions with a controller, over real sockets to a stub in a thread that speaks the wire messages."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from everstep_agent.uplink.session import ControllerSession

from everstep.errors import (
    EverstepError,
    MalformedMessage,
    NotFound,
    PermissionDenied,
    StaleGeneration,
    TooLarge,
    Unavailable,
    VersionMismatch,
)
from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Reports
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import FindingRaised, RankLost, VersionSealed
from tests.support.controller_stub import DEADLINE_S, ControllerStub, serving
from tests.support.uplinks import TOKEN, Bench, lost, refuse_always, refuse_once, stop, until, until_nudged


def sealed(step: int) -> VersionSealed:
    return VersionSealed(job="j", at=0.0, generation=1, rank=0, version=Version(1, step), bytes=1, durable=True)


def test_client_registers_then_beats_with_progress(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: len(controller.beats) >= 3)
            assert len(controller.registered) == 1
            assert [b.seq for b in controller.beats[:3]] == [1, 2, 3]
            assert controller.beats[0].ranks == line.node.rank_progress()
            assert line.node.registrations == 1
            assert line.node.round_trips

    asyncio.run(story())


def test_reports_arrive_numbered_and_are_forgotten_once_durable(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(lost(0))
            line.uplink.report(lost(1))
            await until(lambda: len(controller.taken) == 2 and not len(line.spool))
            assert [n.number for n in controller.taken] == [1, 2]

    asyncio.run(story())


def test_seals_are_batched_and_sent_with_urgent_reports(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, report_batch_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            for step in range(5):
                line.uplink.report(sealed(step))
            await until(lambda: len(controller.beats) >= 3)
            assert controller.taken == []
            line.uplink.report(lost())
            await until(lambda: len(controller.taken) == 6)
            assert [what for what, _ in controller.heard].count("reports") == 1

    asyncio.run(story())


def test_seals_alone_go_after_their_window(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(sealed(1))
            await until(lambda: controller.taken)

    asyncio.run(story())


def test_pushed_directive_arrives_in_order_and_is_acknowledged(bench: Bench, controller: ControllerStub) -> None:
    controller.interval_s = DEADLINE_S  # no beat brings it

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: controller.listening)
            for job in ("a", "b", "c"):
                controller.push(stop(job))
            await until(lambda: len(line.node.directives) == 3)
            assert [d.body for d in line.node.directives] == [stop("a"), stop("b"), stop("c")]
            await until(lambda: controller.acknowledged[-1:] == [3])

    asyncio.run(story())


def test_a_large_push_comes_deflated(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: controller.listening)
            large = StopJob(job="j", ok=True, reason="because " * 500)
            controller.push(large)
            await until(lambda: line.node.directives)
            assert line.node.directives[0].body == large

    asyncio.run(story())


def test_directive_pushed_in_two_sessions_is_handed_on_once(bench: Bench, controller: ControllerStub) -> None:
    controller.unanswered.add("acknowledge")

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: controller.listening)
            controller.push(stop("a"))
            await until(lambda: line.node.directives)
            controller.unanswered.clear()
            controller.drop()
            controller.push(stop("b"))
            await until(lambda: controller.acknowledged[-1:] == [2])
            assert [d.body for d in line.node.directives] == [stop("a"), stop("b")]

    asyncio.run(story())


def test_pending_report_answer_delays_no_heartbeat(bench: Bench, controller: ControllerStub) -> None:
    controller.unanswered.add("reports")

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(lost())
            await until(lambda: controller.taken)
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 3)
            assert len(line.spool) == 1

    asyncio.run(story())


@pytest.mark.promise("report-order")
def test_urgent_report_overtakes_a_pending_report_answer(bench: Bench, controller: ControllerStub) -> None:
    controller.unanswered.add("reports")

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(sealed(1))
            await until(lambda: controller.taken)
            line.uplink.report(sealed(2))
            line.uplink.report(lost())
            await until(lambda: len(controller.taken) >= 3)
            line.uplink.report(lost(1))
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 3)
            assert [one.number for one in controller.taken] == [1, 2, 3], "two requests are under way, and no more"
            assert len(line.spool) == 4, "no answer, nothing is forgotten"

    asyncio.run(story())


@pytest.mark.promise("reports-survive")
def test_reports_wait_for_an_absent_controller_and_arrive_once(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.stop()
            for rank in range(3):
                line.uplink.report(lost(rank))
            await until(lambda: line.uplink.outcomes["session", "unavailable"] >= 2)
            assert len(line.spool) == 3
            controller.start()
            await until(lambda: not len(line.spool))
            assert [n.body for n in controller.taken] == [lost(0), lost(1), lost(2)]
            assert len(controller.registered) == 1

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    away = [r for r in caplog.records if "no controller reachable" in r.message]
    assert len(away) == 1
    assert any("is reachable again" in r.message for r in caplog.records)


@pytest.mark.parametrize("how", ["unknown_node", "stale", "acknowledge"])
@pytest.mark.slow
def test_controller_losing_its_state_gets_everything_again(bench: Bench, controller: ControllerStub, how: str) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            finding = Finding(kind=FindingKind.GPU_LOST, subject="g", severity=Severity.CRITICAL, message="m")
            await until(lambda: line.node.registrations)
            line.node.seen = (finding,)
            await until(lambda: any(b.findings for b in controller.beats))
            if how == "unknown_node":
                controller.forget()
            elif how == "stale":
                refuse_once(controller, "heartbeat", StaleGeneration("an older life"))
            else:
                refuse_once(controller, "acknowledge", NotFound("who?"))
                controller.push(stop())
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].findings == (finding,)
            line.uplink.report(lost())
            await until(lambda: controller.taken)

    asyncio.run(story())


@pytest.mark.parametrize("asks", [False, True])
def test_first_beat_after_session_loss_carries_all_findings(
    bench: Bench, controller: ControllerStub, asks: bool
) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.node.seen = (Finding(kind=FindingKind.GPU_LOST, subject="g", severity=Severity.CRITICAL, message="m"),)
            await until(lambda: any(b.findings for b in controller.beats))
            told = len(controller.beats)
            controller.resend = asks
            controller.drop()
            await until(lambda: any(b.findings for b in controller.beats[told:]))
            await until(lambda: len(line.node.shown) == 2)
            assert line.node.shown == [[], ["j"]]
            assert len(controller.registered) == 1

    asyncio.run(story())


def test_a_change_of_the_vaults_address_is_registered(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.node.vault = "127.0.0.1:9999"
            line.uplink.beat_now()
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].vault == "127.0.0.1:9999"

    asyncio.run(story())


def test_refused_report_does_not_stop_the_others(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(body: bytes) -> None:
        reports = msgspec.json.decode(body, type=Reports).reports
        if any(n.body == lost(3) for n in reports):
            raise MalformedMessage("one of these is not understood")

    controller.refusals["reports"] = refuse

    async def story() -> None:
        async with bench.line(controller.url) as line:
            for rank in range(8):
                line.uplink.report(lost(rank))
            await until(lambda: not len(line.spool))
            assert [n.body for n in controller.taken] == [lost(r) for r in range(8) if r != 3]
            assert line.spool.refused_count == 1

    asyncio.run(story())
    assert any("dropped refused report 4 (RankLost)" in r.message for r in caplog.records)


def test_large_backlog_is_split_into_accepted_requests(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            controller.stop()
            for rank in range(1000):
                line.uplink.report(lost(rank, detail="x" * 3000))
            controller.start()
            await until(lambda: not len(line.spool))
            assert len(controller.taken) == 1000
            assert max(size for _, size in controller.heard) <= 1 << 20

    asyncio.run(story())


def test_controller_with_a_smaller_limit_gets_smaller_requests(bench: Bench, controller: ControllerStub) -> None:
    def refuse(body: bytes) -> None:
        if len(body) > 5000:
            raise TooLarge("over 5000 bytes")

    controller.refusals["reports"] = refuse

    async def story() -> None:
        async with bench.line(controller.url) as line:
            for rank in range(20):
                line.uplink.report(lost(rank, detail="x" * 1000))
            await until(lambda: not len(line.spool))
            assert len(controller.taken) == 20

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionDenied("not your node"), "needs a token of role agent"),
        (VersionMismatch("1 and 2"), "upgrade the older side"),
        (StaleGeneration("a larger incarnation is known"), "another agent runs as node n1"),
    ],
)
def test_permanent_refusal_is_logged_once_with_advice(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture, error: EverstepError, advice: str
) -> None:
    refuse_always(controller, "register", error)

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["register", error.code])
            await until_nudged(line, lambda: line.uplink.outcomes["register", error.code] >= 2)
            assert line.node.registrations == 0

    asyncio.run(story())
    said = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1
    assert advice in said[0]


def test_wrong_token_is_logged_and_a_renewed_file_is_read(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    bench.token_file.write_text("agent:n1:old")

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["session", "unauthenticated"])
            bench.token_file.write_text(TOKEN)
            await until_nudged(line, lambda: line.node.registrations)

    asyncio.run(story())
    said = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert "everstep-controller token --role agent --subject n1" in said[0]
    assert "agent:n1:old" not in caplog.text


@pytest.mark.slow
def test_a_busy_controller_is_asked_again(bench: Bench, controller: ControllerStub) -> None:
    refuse_once(controller, "reports", Unavailable("the database is away"))

    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(lost())
            await until(lambda: controller.taken)
            assert line.uplink.outcomes["reports", "unavailable"] == 1

    asyncio.run(story())


def test_unheld_session_opens_for_beats_and_urgent_reports(bench: Bench, controller: ControllerStub) -> None:
    controller.hold = False

    async def story() -> None:
        async with bench.line(controller.url, uniform=lambda: 0.9) as line:
            await until(lambda: len(controller.beats) >= 2 and not controller.listening)
            controller.push(stop("a"))
            await until(lambda: line.node.directives)
            await until(lambda: controller.acknowledged == [1])
            controller.interval_s = 3 * DEADLINE_S
            line.node.vault = "127.0.0.1:9999"  # registered anew, which brings the new interval
            await until(lambda: len(controller.registered) == 2 and not controller.listening)
            line.uplink.report(lost())
            await until(lambda: controller.taken and not len(line.spool))
            await until(lambda: not controller.listening)
            assert line.uplink.outcomes["session", "ok"] >= 4

    asyncio.run(story())


def test_urgent_report_wakes_an_idle_but_not_a_refused_client(
    bench: Bench, controller: ControllerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.hold = False
    asked: list[str] = []

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: len(controller.beats) >= 2 and not controller.listening)
            refuse_always(controller, "session", PermissionDenied("not your node"))
            await until(lambda: line.uplink.outcomes["session", "forbidden"])
            monkeypatch.setattr("everstep_agent.uplink.client.open_session", lambda url, *_: asked.append(url))
            for rank in range(20):
                line.uplink.report(lost(rank))
                await asyncio.sleep(0)
            assert asked == []

    asyncio.run(story())


def test_client_has_a_single_timer_for_the_next_beat(
    bench: Bench, controller: ControllerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: list[ControllerSession] = []

    class Counted(ControllerSession):
        def send_due(self) -> float:
            turned.append(self)
            return super().send_due()

    monkeypatch.setattr("everstep_agent.uplink.client.ControllerSession", Counted)

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.drop()
            await until(lambda: line.uplink.outcomes["session", "ok"] == 2)
            turned.clear()
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 4)
            assert len(set(turned)) == 1
            for rank in range(50):
                line.uplink.report(lost(rank))
                await asyncio.sleep(0)
            await until(lambda: not len(line.spool))
            turned.clear()
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 4)
            assert len(turned) < 50

    asyncio.run(story())


def test_a_session_is_held_again_when_the_controller_has_room(bench: Bench, controller: ControllerStub) -> None:
    controller.hold = False

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: len(controller.beats) >= 2)
            controller.hold = True
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 2)
            opened, beats = line.uplink.outcomes["session", "ok"], len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 3)
            assert line.uplink.outcomes["session", "ok"] == opened

    asyncio.run(story())


@pytest.mark.parametrize(
    "words", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"x" * 20000]
)
def test_non_controller_endpoint_is_rejected(bench: Bench, words: bytes) -> None:
    async def story() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(words)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with bench.line(f"http://127.0.0.1:{port}") as line:
                await until(lambda: line.uplink.outcomes["session", "protocol"] >= 2)
                assert line.node.registrations == 0

    asyncio.run(story())


def test_malformed_frame_ends_the_session(bench: Bench) -> None:
    class Impostor(ControllerStub):
        def _register(self, body: bytes) -> Any:
            super()._register(body)
            return {"hello": "world"}

    async def story(impostor: ControllerStub) -> None:
        async with bench.line(impostor.url) as line:
            await until(lambda: line.uplink.outcomes["session", "protocol_error"] >= 2)
            assert line.node.registrations == 0

    with serving(Impostor(TOKEN)) as impostor:
        asyncio.run(story(impostor))


def test_internal_error_ends_the_session_and_not_the_uplink(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: controller.beats)
            with monkeypatch.context() as broken:
                broken.setattr(line.node, "rank_progress", lambda: 1 // 0)
                await until(lambda: "ZeroDivisionError" in caplog.text)
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) >= beats + 2)

    asyncio.run(story())


def test_an_ending_agent_hands_over_its_last_reports(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, report_batch_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(lost())
            assert await line.uplink.flush(DEADLINE_S)
            assert controller.reports(RankLost) == [lost()]
            controller.stop()
            line.uplink.report(lost(1))
            assert not await line.uplink.flush(0.01)

    asyncio.run(story())


def test_mild_finding_is_not_sent_at_once(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, report_batch_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            mild = Finding(kind=FindingKind.GPU_TEMPERATURE, subject="g", severity=Severity.WARNING, message="m")
            line.uplink.report(FindingRaised(finding=mild))
            await until(lambda: len(controller.beats) > 3)
            assert controller.taken == []
            line.uplink.report(FindingRaised(finding=msgspec.structs.replace(mild, severity=Severity.CRITICAL)))
            await until(lambda: len(controller.taken) == 2)

    asyncio.run(story())
