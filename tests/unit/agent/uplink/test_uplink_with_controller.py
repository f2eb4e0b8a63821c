"""An agent's uplink and a real controller: the two sides of a session, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1.directives import NewGeneration
from tests.support.agents.uplinks import RunningUplink, UplinkBench, until
from tests.support.fleet.controllers import SECRET, InProcess, joined
from tests.support.fleet.session_client import Connection, ServedController, served

Story = Callable[[RunningUplink, ServedController], Coroutine[Any, Any, None]]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ServedController]:
    with served(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as server:
        yield server


def play(story: Story, controller: ServedController, directory: Path) -> None:
    bench = UplinkBench(directory)
    bench.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))

    async def run_story() -> None:
        async with bench.running_uplink(f"http://{controller.address}") as line:
            await until(lambda: line.uplink.outcomes["heartbeat", "ok"])
            await story(line, controller)

    asyncio.run(run_story())


@pytest.mark.slow
def test_report_causes_a_pushed_and_acknowledged_directive(controller: ServedController, tmp_path: Path) -> None:
    async def story(line: RunningUplink, served: ServedController) -> None:
        line.uplink.report(joined("j", 1.0))
        await until(lambda: any(isinstance(d.body, NewGeneration) for d in line.node.directives))
        await until(lambda: not len(line.spool))
        await until(lambda: not served.controller.outbox.pending_count("n1"))

    play(story, controller, tmp_path)


def test_controller_short_of_descriptors_keeps_the_node_live(controller: ServedController, tmp_path: Path) -> None:
    async def story(line: RunningUplink, served: ServedController) -> None:
        served.descriptors.scarce_from = served.descriptors.exhausted_from = 0
        line.uplink.beat_now()
        await until(lambda: not served.controller.outbox.has_receiver("n1"))
        assert served.controller.loop.state.node_runtime["n1"].disconnected_at is None
        line.uplink.report(joined("j", 1.0))
        await until(lambda: not len(line.spool))
        line.uplink.beat_now()
        await until(lambda: any(isinstance(d.body, NewGeneration) for d in line.node.directives))
        await until(lambda: not served.controller.outbox.pending_count("n1"))
        assert line.node.registrations == 1

    play(story, controller, tmp_path)


@pytest.mark.slow
def test_released_agent_reconnects_with_urgent_reports(controller: ServedController, tmp_path: Path) -> None:
    async def story(line: RunningUplink, served: ServedController) -> None:
        await until(lambda: line.uplink.outcomes["heartbeat", "ok"])
        served.descriptors.scarce_from = 0
        with closing(Connection(served.address)):
            await until(lambda: not served.controller.outbox.has_receiver("n1"))
        assert served.controller.loop.state.node_runtime["n1"].disconnected_at is None
        line.uplink.report(joined("j", 1.0))
        await until(lambda: not len(line.spool))
        assert line.node.registrations == 1

    play(story, controller, tmp_path)
