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

from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from everstep_agent.probes.prober import Prober

pytestmark = pytest.mark.slow

SIZES = (8, 65536)


def probe(*nodes: str, name: str = "probe-1", store: str = "127.0.0.1:0", **values: Any) -> RunProbe:
    trace = str(os.getpid())  # two test runs on one machine use different ports
    settings = {"sizes": SIZES, "repeats": 2, "timeout_s": 60.0, "trace": trace, **values}
    return RunProbe(probe=name, nodes=nodes, store=store, **settings)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, because a prober's futures belong to it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def probers(runner: asyncio.Runner) -> Iterator[tuple[Prober, Prober]]:
    """The probers of two nodes; each has a process that loads torch once, at its first probe."""
    first, second = Prober(), Prober()
    yield first, second
    runner.run(first.close())
    runner.run(second.close())


def test_two_nodes_both_report_times_for_every_size(runner: asyncio.Runner, probers: tuple[Prober, Prober]) -> None:
    async def scene(first: Prober, second: Prober) -> None:
        for name in ("probe-1", "probe-2"):
            asked = probe("n1", "n2", name=name)
            answers = await asyncio.gather(first.run(asked, "n1"), second.run(asked, "n2"))
            for answer in answers:
                assert answer.ok, answer.detail
                assert answer.started
                assert [size for size, _, _ in answer.rows] == list(SIZES)
                assert all(latency > 0 and rate > 0 for _, latency, rate in answer.rows)
            if name == "probe-1":
                warm = first.pid
        assert first.pid == warm

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
        assert absent.started, "the probe counts as started, as the node could have met its partner"

    runner.run(scene(probers[0]))


def test_dead_probe_process_is_an_answer_and_is_replaced(
    runner: asyncio.Runner, probers: tuple[Prober, Prober]
) -> None:

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
        assert prober.pid == second, "the same process must continue to load torch"
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


def test_node_without_torch_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
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
