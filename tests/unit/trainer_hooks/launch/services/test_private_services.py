from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from everstep.bearer_tokens import TokenRole, verify_with_secret
from everstep.clock import ManualClock
from everstep.errors import ConfigurationError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.launch.services import private_services
from everstep_trainer.launch.services.job_rendezvous import ServiceNetwork
from everstep_trainer.launch.services.private_services import PrivateService, PrivateServices, segment_dir
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow  # starts processes

READY = """
import json, os, pathlib, signal, sys
path = pathlib.Path(sys.argv[1])
path.parent.mkdir(exist_ok=True)
path.with_name("draft").write_text(json.dumps({"pid": os.getpid(), "address": sys.argv[2]}))
path.with_name("draft").rename(path)
signal.pause()
"""
FAILING = "import sys; print('the disk is full'); sys.exit(3)"


class ServiceBench:
    """A service over stand-in programs, and a count of its starts."""

    def __init__(self, directory: Path) -> None:
        self.ready_file = directory / "ready.json"
        self.log_file = directory / "service.log"
        self.clock = ManualClock()
        self.service = PrivateService("stand-in", self.log_file, self.ready_file, self.clock)
        self.addresses_given: list[str] = []
        self.program = READY

    def pid(self) -> int:
        """Return the pid of the service that is ready, or 0."""
        return int(json.loads(self.ready_file.read_text())["pid"]) if self.ready_file.exists() else 0

    def command(self, last: str) -> list[str]:
        self.addresses_given.append(last)
        return [sys.executable, "-c", self.program, str(self.ready_file), f"address-{len(self.addresses_given)}"]


@pytest.fixture
def bench(tmp_path: Path) -> ServiceBench:
    return ServiceBench(tmp_path)


def run_service(bench: ServiceBench, act: Callable[[int], Awaitable[None]]) -> None:
    """Start the service, call ``act`` with its pid, and end the service."""

    async def play() -> None:
        try:
            await bench.service.start(bench.command)
            await act(bench.pid())
        finally:
            await bench.service.end()

    asyncio.run(play())


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 60
    while not condition():
        assert time.perf_counter() < deadline, "never happened"
        await asyncio.sleep(0.01)


def test_service_failing_to_start_shows_its_log_tail(bench: ServiceBench) -> None:
    bench.program = FAILING

    async def act(_: int) -> None:
        raise AssertionError("it cannot be ready")

    with pytest.raises(Unavailable, match=r"ended with status 3 while starting(.|\n)*the disk is full"):
        run_service(bench, act)


def has_restarted(bench: ServiceBench, addresses: int, old: int) -> bool:
    return len(bench.addresses_given) == addresses and bench.pid() not in (0, old)


async def kill_again_and_again(bench: ServiceBench, pid: int, times: int, every_s: float) -> None:
    for count in range(times):
        bench.clock.advance(every_s)
        os.kill(pid, signal.SIGKILL)
        await eventually(partial(has_restarted, bench, count + 2, pid))
        pid = bench.pid()


def test_occasionally_dying_service_is_always_restarted(bench: ServiceBench) -> None:
    async def act(pid: int) -> None:
        await kill_again_and_again(
            bench, pid, 2 * private_services.MAX_RESTARTS, every_s=private_services.RESTART_WINDOW_S / 4
        )

    run_service(bench, act)


def test_full_disk_is_named_instead_of_an_empty_log(bench: ServiceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.program = FAILING
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(
        Unavailable, match=r"status 3 while starting: the file system of \S+ is full; make room, or give"
    ):
        asyncio.run(bench.service.start(bench.command))


def test_read_only_memory_file_system_is_named(bench: ServiceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.program = FAILING
    bench.service = PrivateService("agent", bench.log_file, bench.ready_file, bench.clock, Path("/none/segments"))
    read_only = os.statvfs_result((4096, 4096, 100, 9, 9, 10, 10, 10, os.ST_RDONLY, 255))
    found, statvfs = {Path("/"): read_only}, os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: found.get(path) or statvfs(path))
    with pytest.raises(Unavailable, match=r"starting: the file system of /none/segments is read-only; give another"):
        asyncio.run(bench.service.start(bench.command))


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        private_services, "REQUIRED_MODULES", {"controller": ("no_such_web_framework",), "agent": ("msgspec",)}
    )
    with pytest.raises(ConfigurationError, match=r"lacks no_such_web_framework.*everstep\[controller\]"):
        asyncio.run(PrivateServices(tmp_path, "j", SYSTEM_CLOCK).start())


@pytest.fixture
def services(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateServices:
    """The pair of services, replaced by stand-in programs."""

    def controller(run_dir: Path, listen: str, network: ServiceNetwork) -> list[str]:
        return [sys.executable, "-c", READY, str(run_dir / "controller.json"), listen]

    def agent(run_dir: Path, address: str, linger_s: float | None, network: ServiceNetwork) -> list[str]:
        return [sys.executable, "-c", READY, str(run_dir / "agent" / "agent.json"), address]

    monkeypatch.setattr(private_services, "controller_command", controller)
    monkeypatch.setattr(private_services, "_agent_command", agent)
    monkeypatch.setattr(private_services, "SEGMENT_ROOT", short_path / "shm")
    monkeypatch.setattr(private_services, "REQUIRED_MODULES", {})
    return PrivateServices(short_path / "state", "j", SYSTEM_CLOCK)


def test_private_services_protect_secrets_and_leave_only_logs(services: PrivateServices, short_path: Path) -> None:
    async def play() -> None:
        try:
            socket = await services.start()
            run_dir = socket.parents[1]
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
            secret = (run_dir / "secret").read_bytes()
            for name, role in (("agent.token", TokenRole.AGENT), ("operator.token", TokenRole.OPERATOR)):
                assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600
                assert verify_with_secret((secret,), (run_dir / name).read_text())[0].role is role
        finally:
            await services.end()

    asyncio.run(play())
    left = {path.name for path in (short_path / "state").rglob("*") if path.is_file()}
    assert left == {".lock", "j.controller.log", "j.agent.log"}


def test_leftovers_of_a_dead_launcher_are_removed(services: PrivateServices, short_path: Path) -> None:
    state = short_path / "state"
    for name in ("run-dead", "run-alive"):
        (state / name).mkdir(parents=True)
        (state / name / "lock").touch()
    segments = short_path / "shm" / f"everstep-{os.getuid()}" / "run-dead"
    segments.mkdir(parents=True)

    async def play() -> None:
        with (state / "run-alive" / "lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                await services.start()
            finally:
                await services.end()

    asyncio.run(play())
    assert {path.name for path in state.glob("run-*")} == {"run-alive"}
    assert not segments.exists()


def test_segments_lie_where_the_flag_says(services: PrivateServices, short_path: Path) -> None:
    services._segments = short_path / "memory"
    run_dir = short_path / "state" / "run-1"

    async def play() -> None:
        try:
            run_dir = (await services.start()).parents[1]
            assert segment_dir(run_dir) == short_path / "memory" / run_dir.name
            segment_dir(run_dir).mkdir(parents=True)
        finally:
            await services.end()

    asyncio.run(play())
    assert segment_dir(run_dir) == short_path / "shm" / f"everstep-{os.getuid()}" / "run-1"
    assert list((short_path / "memory").iterdir()) == []


class KilledLauncher:
    """The remains of a killed launcher of job ``j``: a run directory with its secrets, and slots in shared memory."""

    def __init__(self, short_path: Path, name: str = "run-left", job: str = "j") -> None:
        self.run_dir = short_path / "state" / name
        self.segments = short_path / "shm" / f"everstep-{os.getuid()}" / name
        (self.run_dir / "agent").mkdir(parents=True)
        (self.segments / job).mkdir(parents=True)
        for file, text in (("job", job), ("secret", "old secret"), ("operator.token", "old"), ("lock", "")):
            (self.run_dir / file).write_text(text)
        (self.segments / job / "own-0").write_bytes(b"slots")


def started_in(services: PrivateServices) -> Path:
    """Start and end the services, and return their run directory."""

    async def play() -> Path:
        try:
            return (await services.start()).parents[1]
        finally:
            await services.end()

    return asyncio.run(play())


def test_leftovers_of_the_same_job_are_taken_over(services: PrivateServices, short_path: Path) -> None:
    left = KilledLauncher(short_path)

    async def play() -> None:
        try:
            assert (await services.start()).parents[1] == left.run_dir
            assert (left.run_dir / "secret").read_text() == "old secret"
            assert (left.segments / "j" / "own-0").read_bytes() == b"slots"
        finally:
            await services.end()

    asyncio.run(play())
    assert not left.run_dir.exists()
    assert not left.segments.exists()


def test_stubborn_service_of_an_earlier_launcher_is_killed(
    services: PrivateServices, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = KilledLauncher(short_path)
    monkeypatch.setattr(private_services, "EXIT_WAIT_S", 0.2)
    stubborn = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", str(left.run_dir)])
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        command = Path(f"/proc/{stubborn.pid}/cmdline")
        until(lambda: left.run_dir.name in command.read_text(), "its command line is there")
        (left.run_dir / "controller.json").write_text(json.dumps({"pid": stubborn.pid}))
        (left.run_dir / "agent" / "agent.json").write_text(json.dumps({"pid": stranger.pid}))
        assert started_in(services) == left.run_dir
        assert stubborn.wait(60) == -signal.SIGKILL
        assert stranger.poll() is None, "its number is one that a service had once"
    finally:
        for process in (stubborn, stranger):
            process.kill()
            process.wait()


def test_taken_over_state_stays_if_services_fail_to_start(
    services: PrivateServices, short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = KilledLauncher(short_path)
    monkeypatch.setattr(
        private_services, "controller_command", lambda run_dir, listen, network: [sys.executable, "-c", FAILING]
    )
    with pytest.raises(Unavailable, match="the disk is full"):
        started_in(services)
    assert (left.segments / "j" / "own-0").exists()
    assert (left.run_dir / "secret").exists()
    assert "everstep vault list and drop" in caplog.text


def test_too_deep_state_directory_is_refused_with_advice(services: PrivateServices, short_path: Path) -> None:
    deep = PrivateServices(short_path / ("d" * 90), "j", SYSTEM_CLOCK)

    async def play() -> None:
        try:
            await deep.start()
        finally:
            await deep.end()

    with pytest.raises(ConfigurationError, match="shorter --state-dir"):
        asyncio.run(play())
    assert not list((short_path / ("d" * 90)).glob("run-*"))


def test_joining_node_starts_an_agent_of_its_own_alone(services: PrivateServices, short_path: Path) -> None:
    network = ServiceNetwork(node="n2", controller="https://192.0.2.7:29400", listen=None, authority_seed=b"seed" * 12)
    joining = PrivateServices(short_path / "state", "j", SYSTEM_CLOCK, None, network)

    async def play() -> str:
        try:
            agent_socket = await joining.start()
            run_dir = agent_socket.parents[1]
            assert run_dir.parent == short_path / "state" / "n2"
            assert json.loads((run_dir / "agent" / "agent.json").read_text())["address"] == "https://192.0.2.7:29400"
            assert not (run_dir / "controller.json").exists()
            assert not joining.has_controller
            return joining.how_to_watch()
        finally:
            await joining.end()

    hint = asyncio.run(play())
    assert "EVERSTEP_CONTROLLER=https://192.0.2.7:29400 EVERSTEP_CA_FILE=" in hint
    assert "token=" not in hint


def test_services_across_nodes_use_tls_and_own_addresses(tmp_path: Path) -> None:
    network = ServiceNetwork(
        node="n1",
        address="192.0.2.8",
        controller="https://192.0.2.8:29400",
        listen="192.0.2.8:29400",
        preset="production",
        authority_seed=b"seed" * 12,
    )
    controller = " ".join(private_services.controller_command(tmp_path, "192.0.2.8:29400", network))
    agent = " ".join(private_services._agent_command(tmp_path, "https://192.0.2.8:29400", None, network))
    assert f"--tls-certificate {tmp_path}/controller.pem --tls-key {tmp_path}/controller.key" in controller
    assert "--advertise 192.0.2.8:29400 --preset production" in controller
    assert f"--node n1 --controller https://192.0.2.8:29400 --token-file {tmp_path}/agent.token" in agent
    assert f"--ca-file {tmp_path}/authority.pem" in agent
    assert "--vault-listen 192.0.2.8:0" in agent
    assert network.secret not in controller + agent
