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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from everstep_trainer.launch import private_services
from everstep_trainer.launch.job_rendezvous import ServiceNetwork
from everstep_trainer.launch.private_services import PrivateService, PrivateServices, segment_dir

from everstep.bearer_tokens import TokenRole, verify_with_secret
from everstep.clock import ManualClock
from everstep.errors import ConfigurationError, Unavailable
from everstep.layout.vault_status import LOCK_FILE
from everstep.system_clock import SYSTEM_CLOCK

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


class Stage:
    """A service over stand-in programs, and a count of its starts."""

    def __init__(self, directory: Path) -> None:
        self.ready_file = directory / "ready.json"
        self.log_file = directory / "service.log"
        self.clock = ManualClock()
        self.service = PrivateService("stand-in", self.log_file, self.ready_file, self.clock)
        self.told: list[str] = []
        self.program = READY

    def pid(self) -> int:
        """Of the service that is ready, 0 where none is."""
        return int(json.loads(self.ready_file.read_text())["pid"]) if self.ready_file.exists() else 0

    def command(self, last: str) -> list[str]:
        self.told.append(last)
        return [sys.executable, "-c", self.program, str(self.ready_file), f"address-{len(self.told)}"]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def played(stage: Stage, act: Callable[[int], Awaitable[None]]) -> None:
    """Starts the service, lets ``act`` do something with its pid, ends it."""

    async def play() -> None:
        try:
            await stage.service.start(stage.command)
            await act(stage.pid())
        finally:
            await stage.service.end()

    asyncio.run(play())


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 60
    while not condition():
        assert time.perf_counter() < deadline, "never happened"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_service_is_ready_with_its_file_and_ends_on_request(stage: Stage) -> None:
    pids: list[int] = []

    async def act(pid: int) -> None:
        pids.append(pid)
        assert os.getsid(pid) == pid  # Ctrl-C in the terminal does not reach it

    played(stage, act)
    assert gone(pids[0])


def test_service_survives_a_schedulers_notice(stage: Stage) -> None:
    async def act(pid: int) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
            assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        pending = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "ShdPnd" in line)
        assert int(pending.split()[1], 16) == 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGUSR2 - 1
        assert stage.pid() == pid

    played(stage, act)


def test_service_failing_to_start_shows_its_log_tail(stage: Stage) -> None:
    stage.program = FAILING

    async def act(_: int) -> None:
        raise AssertionError("it cannot be ready")

    with pytest.raises(Unavailable, match=r"ended with status 3 while starting(.|\n)*the disk is full"):
        played(stage, act)


KILLED_ONCE = """
import os, pathlib, signal, sys
mark = pathlib.Path(sys.argv[1]).with_name("killed")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_service_killed_while_starting_is_restarted_once(stage: Stage) -> None:
    stage.program = KILLED_ONCE + READY

    async def act(pid: int) -> None:
        (stage.ready_file.parent / "killed").unlink()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: stage.pid() not in (0, pid))

    played(stage, act)


def test_service_killed_at_each_start_fails(stage: Stage) -> None:
    stage.program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    async def act(_: int) -> None:
        raise AssertionError("it cannot be ready")

    with pytest.raises(Unavailable, match="ended with status -9 while starting"):
        played(stage, act)


def test_ready_file_of_an_earlier_run_is_ignored(stage: Stage) -> None:
    stage.ready_file.write_text('{"pid": 1, "address": "old"}')

    async def act(pid: int) -> None:
        assert pid != 1

    played(stage, act)


def test_dead_service_restarts_with_its_previous_address(stage: Stage) -> None:
    async def act(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: len(stage.told) == 2 and stage.ready_file.exists())
        assert stage.told == ["", "address-1"]

    played(stage, act)


async def kill_again_and_again(stage: Stage, pid: int, times: int, every_s: float) -> None:
    for count in range(times):
        stage.clock.advance(every_s)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda count=count, old=pid: len(stage.told) == count + 2 and stage.pid() not in (0, old))
        pid = stage.pid()


def test_occasionally_dying_service_is_always_restarted(stage: Stage) -> None:
    async def act(pid: int) -> None:
        await kill_again_and_again(
            stage, pid, 2 * private_services.MAX_RESTARTS, every_s=private_services.RESTART_WINDOW_S / 4
        )

    played(stage, act)


def test_service_dying_too_often_is_left_alone(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def act(pid: int) -> None:
        await kill_again_and_again(stage, pid, private_services.MAX_RESTARTS, every_s=1.0)
        os.kill(stage.pid(), signal.SIGKILL)
        await eventually(lambda: stage.service._watch is not None and stage.service._watch.done())
        assert len(stage.told) == 1 + private_services.MAX_RESTARTS

    played(stage, act)
    assert "ended 6 times within 60 s, last with status -9; training continues" in caplog.text


def test_service_failing_to_restart_is_left_alone(stage: Stage) -> None:
    async def act(pid: int) -> None:
        stage.program = FAILING
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: stage.service._watch is not None and stage.service._watch.done())
        assert len(stage.told) == 2

    played(stage, act)


def test_full_disk_is_named_instead_of_an_empty_log(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.program = FAILING
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(private_services.os, "statvfs", lambda _: full)
    with pytest.raises(
        Unavailable, match=r"status 3 while starting: the file system of \S+ is full; make room, or give"
    ):
        asyncio.run(stage.service.start(stage.command))


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        private_services, "REQUIRED_MODULES", {"controller": ("no_such_web_framework",), "agent": ("msgspec",)}
    )
    with pytest.raises(ConfigurationError, match=r"lacks no_such_web_framework.*everstep\[controller\]"):
        asyncio.run(PrivateServices(tmp_path, "j", SYSTEM_CLOCK).start())


@pytest.fixture
def services(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateServices]:
    """The pair of services, played by stand-ins."""

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


class Left:
    """What a killed launcher of job ``j`` left: a run directory with its secrets, and slots in shared memory."""

    def __init__(self, short_path: Path, name: str = "run-left", job: str = "j") -> None:
        self.run_dir = short_path / "state" / name
        self.segments = short_path / "shm" / f"everstep-{os.getuid()}" / name
        (self.run_dir / "agent").mkdir(parents=True)
        (self.segments / job).mkdir(parents=True)
        for file, text in (("job", job), ("secret", "old secret"), ("operator.token", "old"), ("lock", "")):
            (self.run_dir / file).write_text(text)
        (self.segments / job / "own-0").write_bytes(b"slots")


def started_in(services: PrivateServices) -> Path:
    """The run directory that the services were started in. They are ended again."""

    async def play() -> Path:
        try:
            return (await services.start()).parents[1]
        finally:
            await services.end()

    return asyncio.run(play())


def test_leftovers_of_the_same_job_are_taken_over(services: PrivateServices, short_path: Path) -> None:
    left = Left(short_path)

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


def test_leftovers_of_other_jobs_or_boots_are_removed(services: PrivateServices, short_path: Path) -> None:
    other, booted = Left(short_path, "run-other", job="other"), Left(short_path, "run-booted")
    (booted.segments / "j" / "own-0").unlink()
    assert started_in(services) not in (other.run_dir, booted.run_dir)
    assert not any(path.exists() for left in (other, booted) for path in (left.run_dir, left.segments))


def test_segments_of_a_lingering_vault_stay(services: PrivateServices, short_path: Path) -> None:
    other = Left(short_path, job="other")
    with (other.segments / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        started_in(services)
    assert (other.segments / "other" / "own-0").exists()
    assert other.run_dir.exists()


def test_stubborn_service_of_an_earlier_launcher_is_killed(
    services: PrivateServices, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Left(short_path)
    monkeypatch.setattr(private_services, "EXIT_WAIT_S", 0.2)
    stubborn = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", str(left.run_dir)])
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        (left.run_dir / "controller.json").write_text(json.dumps({"pid": stubborn.pid}))
        (left.run_dir / "agent" / "agent.json").write_text(json.dumps({"pid": stranger.pid}))
        assert started_in(services) == left.run_dir
        assert stubborn.wait(60) == -signal.SIGKILL
        assert stranger.poll() is None, "its number is one that a service had once"
    finally:
        for process in (stubborn, stranger):
            process.kill()
            process.wait()


def test_starting_agent_of_an_earlier_launcher_is_awaited(
    services: PrivateServices, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, started = Left(short_path), private_services.controller_command
    held = (left.run_dir / "agent" / "agent.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    looked: list[Path] = []

    def is_held(directory: Path, name: str = LOCK_FILE) -> bool:
        if looked:
            held.close()
        looked.append(directory)
        return run_directory_is_held(directory, name)

    def controller(run_dir: Path, listen: str, network: ServiceNetwork) -> list[str]:
        assert held.closed, "the agent's lock was free before anything was started"
        return started(run_dir, listen, network)

    run_directory_is_held = private_services.is_locked
    monkeypatch.setattr(private_services, "is_locked", is_held)
    monkeypatch.setattr(private_services, "controller_command", controller)
    assert started_in(services) == left.run_dir


def test_taken_over_state_stays_if_services_fail_to_start(
    services: PrivateServices, short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = Left(short_path)
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


def test_unwritable_state_directory_is_refused_with_advice(services: PrivateServices, short_path: Path) -> None:
    (short_path / "home").touch()
    unwritable = PrivateServices(short_path / "home" / "state", "j", SYSTEM_CLOCK)
    with pytest.raises(ConfigurationError, match="give another --state-dir"):
        asyncio.run(unwritable.start())


def test_service_impossible_to_restart_is_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def act(pid: int) -> None:
        stage.log_file.unlink()
        stage.log_file.mkdir()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: "the private stand-in cannot be started" in caplog.text)

    played(stage, act)


def test_only_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_services, "MAX_LOGS", 2)
    for age in range(4):
        path = tmp_path / f"{age}.log"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    private_services._prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0.log", "1.log"}


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
