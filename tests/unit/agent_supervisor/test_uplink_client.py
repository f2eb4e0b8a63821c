"""The agent's lines to a controller, over real HTTP to a server in a thread that speaks the wire messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from agent.config import AgentSettings
from agent.uplink.client import Uplink
from agent.uplink.heartbeat import Conversation, NodeFacts
from agent.uplink.spool import Spool
from everstep.errors import (
    EverstepError,
    MalformedMessage,
    PermissionDenied,
    StaleGeneration,
    TooLarge,
    Unavailable,
    VersionMismatch,
)
from everstep.ids import Version
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import Reports
from everstep.wire.v1.directives import Directive, StopJob
from everstep.wire.v1.training import FindingRaised, RankLost, RankProgress, Sealed
from tests.support.controller_stub import DEADLINE_S, ControllerStub, serving

T = TypeVar("T")
TOKEN = "agent:n1:mac"


def lost(rank: int = 0, detail: str = "gone") -> RankLost:
    return RankLost(job="j", at=0.0, generation=1, rank=rank, local_rank=rank, detail=detail)


def sealed(step: int) -> Sealed:
    return Sealed(job="j", at=0.0, generation=1, rank=0, version=Version(1, step), bytes=1, safe=True)


def stop(job: str = "j") -> StopJob:
    return StopJob(job=job, ok=True, reason="done")


class FakeNode:
    """The agent behind an uplink: says what it is set to, remembers what it is told."""

    def __init__(self) -> None:
        self.vault = "127.0.0.1:7702"
        self.seen: tuple[Finding, ...] = ()
        self.directives: list[Directive] = []
        self.registrations = 0
        self.round_trips: list[float] = []

    def facts(self) -> NodeFacts:
        return NodeFacts(vault=self.vault)

    def findings(self) -> tuple[Finding, ...]:
        return self.seen

    def progress(self) -> tuple[RankProgress, ...]:
        return (RankProgress(job="j", generation=1, rank=0, step=3, step_s=0.1),)

    def is_busy(self) -> bool:
        return True

    def on_registered(self) -> None:
        self.registrations += 1

    def on_directives(self, directives: list[Directive]) -> None:
        self.directives += directives

    def on_clock(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        self.round_trips.append(round_trip_s)


class Line:
    """An uplink that runs, with what stands around it."""

    def __init__(self, node: FakeNode, uplink: Uplink, spool: Spool) -> None:
        self.node = node
        self.uplink = uplink
        self.spool = spool


class Bench:
    """Settings and files for uplinks of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token_file = directory / "token"
        self.token_file.write_text(TOKEN + "\n")

    @contextlib.asynccontextmanager
    async def line(self, *urls: str, **settings: Any) -> AsyncIterator[Line]:
        given = {"poll_wait_s": 0.5, "connect_timeout_s": 1.0, "request_timeout_s": 2.0, "seal_window_s": 0.05}
        chosen = AgentSettings(
            node="n1", controllers=urls, run_dir=self.directory, token_file=self.token_file, **{**given, **settings}
        )
        spool = Spool(None, most_reports=5000, most_bytes=8 << 20, window_s=chosen.seal_window_s)
        node = FakeNode()
        uplink = Uplink(chosen, Conversation("n1", 7, "0.1.0"), spool, node, SYSTEM_CLOCK)
        running = asyncio.create_task(uplink.run())
        try:
            yield Line(node, uplink, spool)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            uplink.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def controller() -> Iterator[ControllerStub]:
    with serving(ControllerStub(TOKEN)) as stub:
        yield stub


async def until(condition: Callable[[], T]) -> T:
    """What ``condition`` returns, once it is true. Raises TimeoutError past the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := condition()):
            await asyncio.sleep(0.002)
        return found


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_it_registers_then_beats_with_progress(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: len(controller.beats) >= 3)
            assert len(controller.registered) == 1
            assert [b.seq for b in controller.beats[:3]] == [1, 2, 3]
            assert controller.beats[0].ranks == line.node.progress()
            assert line.node.registrations == 1
            assert line.node.round_trips

    play(story())


def test_reports_arrive_numbered_and_are_forgotten_once_durable(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(lost(0))
            line.uplink.report(lost(1))
            await until(lambda: len(controller.taken) == 2 and not len(line.spool))
            assert [n.number for n in controller.taken] == [1, 2]
            await until(lambda: controller.beats and controller.beats[-1].reports_through == 2)

    play(story())


def test_seals_are_gathered_into_one_request_and_urgent_ones_take_them_along(
    bench: Bench, controller: ControllerStub
) -> None:
    async def story() -> None:
        async with bench.line(controller.url, seal_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            for step in range(5):
                line.uplink.report(sealed(step))
            await until(lambda: len(controller.beats) >= 3)
            assert controller.taken == []
            line.uplink.report(lost())
            await until(lambda: len(controller.taken) == 6)
            assert [route for route, _ in controller.requests].count("reports") == 1

    play(story())


def test_seals_alone_go_after_their_window(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(sealed(1))
            await until(lambda: controller.taken)

    play(story())


def test_a_pushed_directive_arrives_at_once_in_order_and_is_acknowledged(
    bench: Bench, controller: ControllerStub
) -> None:
    async def story() -> None:
        async with bench.line(controller.url, poll_wait_s=DEADLINE_S) as line:
            await until(lambda: controller.polls)
            for job in ("a", "b", "c"):
                controller.push(stop(job))
            await until(lambda: len(line.node.directives) == 3)
            assert [d.body for d in line.node.directives] == [stop("a"), stop("b"), stop("c")]
            await until(lambda: controller.polls[-1] == 3)

    play(story())


def test_a_poll_that_waits_holds_up_neither_beats_nor_reports(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, poll_wait_s=DEADLINE_S) as line:
            await until(lambda: controller.polls)
            line.uplink.report(lost())
            await until(lambda: controller.taken)
            await until(lambda: len(controller.beats) >= 3)
            assert len(controller.polls) == 1

    play(story())


def test_while_the_controller_is_away_reports_wait_and_then_arrive_once(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.stop()
            for rank in range(3):
                line.uplink.report(lost(rank))
            await until(lambda: line.uplink.outcomes["heartbeat", "unavailable"] >= 2)
            assert len(line.spool) == 3
            controller.start()
            await until(lambda: not len(line.spool))
            assert [n.body for n in controller.taken] == [lost(0), lost(1), lost(2)]
            assert len(controller.registered) == 1

    with caplog.at_level(logging.INFO):
        play(story())
    away = [r for r in caplog.records if "no controller answers" in r.message]
    assert len(away) == 1
    assert any("answers again" in r.message for r in caplog.records)


def test_directives_pushed_after_a_restart_still_arrive(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, poll_wait_s=DEADLINE_S) as line:
            await until(lambda: controller.polls)
            controller.stop()
            controller.start()
            controller.push(stop())
            await until(lambda: line.node.directives)

    play(story())


@pytest.mark.parametrize("how", ["resend", "unknown_node", "stale"])
def test_a_controller_that_lost_its_picture_is_told_everything_again(
    bench: Bench, controller: ControllerStub, how: str
) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            finding = Finding(kind=FindingKind.GPU_LOST, subject="g", severity=Severity.CRITICAL, message="m")
            await until(lambda: line.node.registrations)
            line.node.seen = (finding,)
            await until(lambda: any(b.findings for b in controller.beats))
            if how == "resend":
                controller.resend = True
            elif how == "unknown_node":
                controller.forget()
            else:
                refuse_once(controller, "heartbeat", StaleGeneration("an older life"))
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].findings == (finding,)
            line.uplink.report(lost())
            await until(lambda: controller.taken)

    play(story())


def test_reports_to_a_controller_that_forgot_the_node_wait_for_the_registration(
    bench: Bench, controller: ControllerStub
) -> None:
    controller.interval_s = DEADLINE_S  # no beat comes to the rescue

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.forget()
            line.uplink.report(lost())
            await until(lambda: controller.taken)
            assert line.node.registrations == 2

    play(story())


def test_a_change_of_the_vaults_address_is_registered(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            line.node.vault = "127.0.0.1:9999"
            line.uplink.nudge()
            await until(lambda: line.node.registrations == 2)
            assert controller.registered[-1].vault == "127.0.0.1:9999"

    play(story())


def refuse_once(controller: ControllerStub, route: str, error: EverstepError) -> None:
    def refuse(body: bytes) -> None:
        del controller.refusals[route]
        raise error

    controller.refusals[route] = refuse


def test_a_report_that_is_never_taken_does_not_stop_the_others(
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
            assert line.spool.refused == 1

    play(story())
    assert any("report 4 (RankLost) is left out" in r.message for r in caplog.records)


def test_a_large_backlog_is_cut_into_requests_that_are_taken(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            controller.stop()
            for rank in range(1000):
                line.uplink.report(lost(rank, detail="x" * 3000))
            controller.start()
            await until(lambda: not len(line.spool))
            assert len(controller.taken) == 1000
            assert max(size for _, size in controller.requests) <= 1 << 20

    play(story())


def test_a_controller_with_a_smaller_limit_is_given_smaller_requests(bench: Bench, controller: ControllerStub) -> None:
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

    play(story())


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionDenied("not your node"), "needs a token of role agent"),
        (VersionMismatch("1 and 2"), "upgrade the older side"),
        (StaleGeneration("a larger incarnation is known"), "another agent speaks for n1"),
    ],
)
def test_what_a_person_must_mend_is_said_once_with_the_mend(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture, error: EverstepError, advice: str
) -> None:
    def refuse(body: bytes) -> None:
        raise error

    controller.refusals["register"] = refuse

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["heartbeat", error.code])
            line.uplink.nudge()
            await until(lambda: line.uplink.outcomes["heartbeat", error.code] >= 2)
            assert line.node.registrations == 0

    play(story())
    said = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1
    assert advice in said[0]


def test_a_wrong_token_is_said_and_a_renewed_file_is_read(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    bench.token_file.write_text("agent:n1:old")

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["heartbeat", "unauthenticated"])
            bench.token_file.write_text(TOKEN)
            line.uplink.nudge()  # refused once more where the file had been read before it was renewed
            refused = line.uplink.outcomes
            await until(lambda: line.node.registrations or refused["heartbeat", "unauthenticated"] >= 2)
            line.uplink.nudge()
            await until(lambda: line.node.registrations)

    play(story())
    said = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert "everstep-controller token --role agent --subject n1" in said[0]
    assert "agent:n1:old" not in caplog.text


def test_a_busy_controller_is_asked_again(bench: Bench, controller: ControllerStub) -> None:
    refuse_once(controller, "reports", Unavailable("the database is away"))

    async def story() -> None:
        async with bench.line(controller.url) as line:
            line.uplink.report(lost())
            await until(lambda: controller.taken)
            assert line.uplink.outcomes["reports", "unavailable"] == 1

    play(story())


def test_when_one_controller_goes_the_next_is_used_by_every_line(bench: Bench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.line(controller.url, second.url, poll_wait_s=DEADLINE_S) as line:
            await until(lambda: controller.polls)
            controller.stop()
            await until(lambda: second.polls)
            line.uplink.report(lost())
            await until(lambda: second.taken)
            second.push(stop())
            await until(lambda: line.node.directives)

    with serving(ControllerStub(TOKEN)) as second:
        play(story(second))


def test_a_controller_that_accepts_and_never_answers_is_given_up(bench: Bench, controller: ControllerStub) -> None:
    async def story(mute: socket.socket) -> None:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with bench.line(url, controller.url, request_timeout_s=0.1) as line:
            await until(lambda: line.node.registrations)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        play(story(mute))


def test_what_is_no_controller_is_not_believed(bench: Bench) -> None:
    class Impostor(ControllerStub):
        def _register(self, body: bytes) -> Any:
            self.registered.append(body)  # type: ignore[arg-type]
            return {"hello": "world"}

    async def story(impostor: ControllerStub) -> None:
        async with bench.line(impostor.url) as line:
            await until(lambda: line.uplink.outcomes["heartbeat", "not_understood"] >= 2)
            assert line.node.registrations == 0

    with serving(Impostor(TOKEN)) as impostor:
        play(story(impostor))


def test_an_ending_agent_hands_over_its_last_reports(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, seal_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            line.uplink.report(lost())
            assert await line.uplink.flush(DEADLINE_S)
            assert controller.reports(RankLost) == [lost()]
            controller.stop()
            line.uplink.report(lost(1))
            assert not await line.uplink.flush(0.01)

    play(story())


def test_mild_findings_do_not_interrupt(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url, seal_window_s=DEADLINE_S) as line:
            await until(lambda: line.node.registrations)
            mild = Finding(kind=FindingKind.GPU_TEMPERATURE, subject="g", severity=Severity.WARNING, message="m")
            line.uplink.report(FindingRaised(finding=mild))
            await until(lambda: len(controller.beats) > 3)
            assert controller.taken == []
            line.uplink.report(FindingRaised(finding=msgspec.structs.replace(mild, severity=Severity.CRITICAL)))
            await until(lambda: len(controller.taken) == 2)

    play(story())
