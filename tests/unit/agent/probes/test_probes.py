from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from everstep_agent.probes.probe_messages import bus_bandwidth, result_row, store_address
from everstep_agent.probes.prober import Prober

from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

pytestmark = pytest.mark.slow

SIZES = (8, 65536)


def probe(*nodes: str, name: str = "probe-1", store: str = "127.0.0.1:0", **values: Any) -> RunProbe:
    trace = str(os.getpid())  # two test runs on one machine do not meet
    settings = {"sizes": SIZES, "repeats": 2, "timeout_s": 60.0, "trace": trace, **values}
    return RunProbe(probe=name, nodes=nodes, store=store, **settings)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests: what a prober waits for is bound to it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def probers(runner: asyncio.Runner) -> Iterator[tuple[Prober, Prober]]:
    """Two nodes', each with a process that loads torch once, at its first probe."""
    one, two = Prober(), Prober()
    yield one, two
    runner.run(one.close())
    runner.run(two.close())


def test_bus_bandwidth_is_the_rate_of_each_link() -> None:
    assert bus_bandwidth(2, 1000, 1.0) == 1000
    assert bus_bandwidth(4, 1000, 1.0) == 1500
    assert result_row(2, 100, [3.0, 1.0, 2.0]) == (100, 2.0, 50.0)


def test_members_derive_one_port_per_probe() -> None:
    first = store_address(probe("n1", "n2"))
    assert store_address(probe("n1", "n2")) == first
    assert store_address(probe("n1", "n2", name="probe-2")) != first
    assert 20_000 <= first[1] < 32_000
    assert store_address(probe("n1", "n2", store="10.0.0.1:7800")) == ("10.0.0.1", 7800)


def test_two_nodes_both_report_times_for_every_size(runner: asyncio.Runner, probers: tuple[Prober, Prober]) -> None:
    async def scene(one: Prober, two: Prober) -> None:
        for name in ("probe-1", "probe-2"):
            asked = probe("n1", "n2", name=name)
            answers = await asyncio.gather(one.run(asked, "n1"), two.run(asked, "n2"))
            for answer in answers:
                assert answer.ok, answer.detail
                assert answer.started
                assert [size for size, _, _ in answer.rows] == list(SIZES)
                assert all(latency > 0 and rate > 0 for _, latency, rate in answer.rows)
            if name == "probe-1":
                warm = one.pid
        assert one.pid == warm

    runner.run(scene(*probers))


def test_probe_failure_is_an_answer_with_its_cause(runner: asyncio.Runner, probers: tuple[Prober, Prober]) -> None:
    async def scene(prober: Prober) -> None:
        alone = await prober.run(probe("n1"), "n1")
        assert alone.ok, alone.detail
        assert len(alone.rows) == 1
        warm = prober.pid

        stranger = await prober.run(probe("n1", "n2"), "n3")
        assert (stranger.ok, stranger.detail) == (False, "n3 is not one of the nodes of this probe")
        assert not stranger.started

        unknown = await prober.run(probe("n1", "n2", backend="mpi"), "n1")
        assert "unknown backend 'mpi'" in unknown.detail
        assert not unknown.started

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            answer = await prober.run(probe("n1", "n2", store=f"127.0.0.1:{port}"), "n1")
        assert f"cannot host the store at 127.0.0.1:{port}" in answer.detail
        assert not answer.started
        assert prober.pid == warm

        absent = await prober.run(probe("n1", "n2", name="alone", timeout_s=1.0), "n1")
        assert not absent.ok
        assert absent.detail
        assert absent.started, "it could have exchanged with whoever was there"

    runner.run(scene(probers[0]))


def test_dead_probe_process_is_an_answer_and_is_replaced(
    runner: asyncio.Runner, probers: tuple[Prober, Prober]
) -> None:
    """Its successor has begun no probe before it is ready."""

    async def scene(prober: Prober) -> None:
        assert (await prober.run(probe("n1"), "n1")).ok
        pid = prober.pid
        assert pid is not None
        waiting = asyncio.create_task(prober.run(probe("n1", "n2", timeout_s=30.0), "n1"))
        async with asyncio.timeout(60):
            while prober._child is None or "connecting" not in prober._child.stage:
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        answer = await waiting
        assert (answer.ok, answer.started) == (False, False)
        assert "exit status -9" in answer.detail

        cold = await prober.run(probe("n1", "n2", timeout_s=0.01), "n1")
        assert (cold.ok, cold.started) == (False, False)
        second = prober.pid
        assert second not in (None, pid)
        assert (await prober.run(probe("n1"), "n1")).ok
        assert prober.pid == second, "it went on loading torch"
        child = prober._child
        assert child is not None

        async def stop_when_it_waits() -> None:
            while "other nodes" not in child.stage:
                await asyncio.sleep(0.01)
            os.kill(child.pid, signal.SIGSTOP)

        stopped = asyncio.create_task(stop_when_it_waits())
        late = await prober.run(probe("n1", "n2", timeout_s=5.0), "n1")
        await stopped
        assert late.detail == "no result within 5 s at: connecting to the other nodes"
        assert (late.ok, late.started) == (False, True)

    runner.run(scene(probers[1]))


def test_a_node_without_torch_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))

    async def scene() -> ProbeFinished:
        prober = Prober()
        try:
            return await prober.run(probe("n1", "n2"), "n1")
        finally:
            await prober.close()

    answer = asyncio.run(scene())
    assert answer.detail == "the probe process ended (exit status 1) at: loading torch"
    assert (answer.ok, answer.started) == (False, False)


def test_probe_process_failing_to_load_torch_is_ended() -> None:
    async def act() -> None:
        prober = Prober(load_timeout_s=0.0)
        try:
            assert not (await prober.run(probe("n1", timeout_s=0.01), "n1")).ok
            assert prober.pid is None
        finally:
            await prober.close()

    asyncio.run(act())


def test_idle_probe_process_is_released(
    runner: asyncio.Runner, probers: tuple[Prober, Prober], monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = probers[0]
    monkeypatch.setattr(prober, "_idle_s", 0.01)

    async def act() -> None:
        assert (await prober.run(probe("n1"), "n1")).ok
        async with asyncio.timeout(60):
            while prober.pid is not None:
                await asyncio.sleep(0.01)

    runner.run(act())


@pytest.mark.gpu
def test_every_gpu_of_a_node_computes_the_same(runner: asyncio.Runner, probers: tuple[Prober, Prober]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")

    async def scene(prober: Prober) -> None:
        answer = await prober.run(probe("n1", timeout_s=120.0), "n1")
        assert answer.ok, answer.detail
        assert len(answer.rows) == torch.cuda.device_count()

    runner.run(scene(probers[0]))
