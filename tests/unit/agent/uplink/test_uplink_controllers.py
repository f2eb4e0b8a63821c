"""An agent with several controllers: it stays with one that answers, and goes on to the next where that does not."""

from __future__ import annotations

import asyncio
import socket

import pytest

from everstep.errors import PermissionDenied, Unavailable
from tests.support.controller_stub import DEADLINE_S, ControllerStub, serving
from tests.support.uplinks import TOKEN, Bench, lost, refuse_always, refuse_once, stop, until


def test_lost_controller_is_replaced_by_the_next(bench: Bench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.line(controller.url, second.url) as line:
            await until(lambda: controller.listening)
            controller.stop()
            await until(lambda: second.listening)
            line.uplink.report(lost())
            await until(lambda: second.taken)
            second.push(stop())
            await until(lambda: line.node.directives)

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


def test_mute_controller_is_given_up(bench: Bench, controller: ControllerStub) -> None:
    async def story(mute: socket.socket) -> None:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with bench.line(url, controller.url, connect_timeout_s=0.1) as line:
            await until(lambda: line.node.registrations)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(story(mute))


@pytest.mark.slow
def test_unresponsive_controller_is_left_for_the_next(bench: Bench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.line(controller.url, second.url, answer_timeout_s=0.1, connect_timeout_s=0.1) as line:
            await until(lambda: controller.beats)
            controller.unanswered.add("heartbeat")
            await until(lambda: second.beats)
            assert line.uplink.outcomes["heartbeat", "unavailable"] >= 1

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


@pytest.mark.parametrize("what", ["session", "heartbeat"])
def test_standby_controller_sends_the_agent_to_the_next(bench: Bench, controller: ControllerStub, what: str) -> None:
    async def story(second: ControllerStub) -> None:
        async with bench.line(controller.url, second.url) as line:
            await until(lambda: controller.beats)
            refuse_always(controller, what, Unavailable("another controller has the lease", DEADLINE_S))
            controller.drop()
            line.uplink.report(lost())
            await until(lambda: second.taken)

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


def test_forbidding_controller_is_retried_slowly_among_others(bench: Bench, controller: ControllerStub) -> None:
    async def story(second: ControllerStub) -> None:
        refuse_always(controller, "session", PermissionDenied("not your node"))
        refuse_always(second, "session", Unavailable("standing by", 0.0))
        async with bench.line(controller.url, second.url) as line:
            await until(lambda: line.uplink.outcomes["session", "unavailable"] >= 5)
            assert line.uplink.outcomes["session", "forbidden"] == 1

    with serving(ControllerStub(TOKEN)) as second:
        asyncio.run(story(second))


def test_lone_controller_refusing_a_beat_keeps_its_session(bench: Bench, controller: ControllerStub) -> None:
    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            refuse_once(controller, "heartbeat", Unavailable("too much to do", 0.0))
            await until(lambda: line.uplink.outcomes["heartbeat", "unavailable"])
            beats = len(controller.beats)
            await until(lambda: len(controller.beats) > beats)
            assert line.uplink.outcomes["session", "ok"] == 1

    asyncio.run(story())


def test_refused_session_is_counted_and_logged(
    bench: Bench, controller: ControllerStub, caplog: pytest.LogCaptureFixture
) -> None:
    controller.refusals["session"] = lambda head: (_ for _ in ()).throw(PermissionDenied("not your node"))

    async def story() -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["session", "forbidden"])

    asyncio.run(story())
    assert "not your node (403)" in caplog.text
