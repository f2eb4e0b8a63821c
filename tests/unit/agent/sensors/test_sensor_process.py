from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep_agent.sensors.monitor import SensorMonitor, SensorSettings

from everstep.errors import ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Action, Severity
from tests.support.processes import is_running
from tests.support.sensing import BUS, DEADLINE_S, FELL_OFF, Control, Watched, watched

pytestmark = pytest.mark.slow  # starts processes

XID_79 = f"gpu.xid/{BUS}/79"


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control(tmp_path / "control.json")


@pytest.fixture
def settings(tmp_path: Path, control: Control) -> SensorSettings:
    log = tmp_path / "kern.log"
    log.touch()
    return SensorSettings(
        node="n1",
        virtual="default",
        virtual_control=str(control.path),
        kernel_log=str(log),
        state_path=str(tmp_path / "sensors.json"),
        interval_s=0.1,
        hang_timeout_s=1.0,
        restart_floor_s=0.05,
        restart_ceiling_s=0.2,
    )


def play(settings: SensorSettings, scene: Callable[[Watched], Awaitable[Any]]) -> Any:
    async def act() -> Any:
        async with watched(settings) as sensing:
            await sensing.until(lambda picture: bool(picture.polled_at))
            return await scene(sensing)

    return asyncio.run(act())


def write_line(settings: SensorSettings, line: str) -> None:
    with open(settings.kernel_log, "a") as file:
        file.write(line + "\n")


def test_eight_virtual_gpus_are_seen_healthy(settings: SensorSettings) -> None:
    async def scene(sensing: Watched) -> None:
        picture = sensing.pictures[-1]
        assert [gpu.index for gpu in picture.poll.known_gpus] == list(range(8))
        assert picture.poll.known_gpus[0].pci_bus_id == BUS
        assert picture.poll.known_gpus[0].part_number
        assert all(getattr(picture.poll.host_identity, word) for word in picture.poll.host_identity.__struct_fields__)
        assert picture.findings == ()
        assert picture.poll.boot_id == "virtual-boot-1"
        assert sensing.process.pid not in (None, os.getpid())

    play(settings, scene)


def test_gpu_off_the_bus_is_found_in_log_and_cleared_by_reset(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: Watched) -> None:
        write_line(settings, FELL_OFF)
        picture = await sensing.until_finding(XID_79)
        (finding,) = picture.findings
        assert finding.severity is Severity.CRITICAL
        assert Action.strongest(finding.action, Action.DRAIN) is finding.action
        assert finding.evidence["uuid"] == picture.poll.known_gpus[0].uuid
        control.write(gpus={"0": {"reset_at": SYSTEM_CLOCK.wall()}})
        assert (await sensing.until_no_finding(XID_79)).findings == ()

    play(settings, scene)


def test_kernel_line_is_processed_before_the_next_poll(settings: SensorSettings) -> None:
    async def scene(sensing: Watched) -> None:
        polled_at = sensing.pictures[-1].polled_at
        write_line(settings, FELL_OFF)
        assert (await sensing.until_finding(XID_79)).polled_at == polled_at

    play(msgspec.structs.replace(settings, interval_s=3600.0), scene)


def test_control_file_sets_xid_loss_and_boot_id(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: Watched) -> None:
        control.write(gpus={"0": {"xid": 79, "lost": True}})
        await sensing.until_finding(f"gpu.lost/{BUS}")
        picture = await sensing.until_finding(XID_79)
        assert picture.poll.gpus[0].lost
        assert len(picture.poll.gpus) == 8
        control.write(boot_id="virtual-boot-2")
        picture = await sensing.until_no_finding(XID_79)
        assert picture.poll.boot_id == "virtual-boot-2"

    play(settings, scene)


@pytest.mark.promise("sensor-failure")
def test_hung_driver_is_reported_and_sensor_process_replaced(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: Watched) -> None:
        first = sensing.process.pid
        control.write(gpus={"3": {"hang": True}})
        picture = await sensing.until_finding("sensor.hung/nvml")
        (finding,) = picture.findings
        assert "gpu 3 at 0000:61:00" in finding.message
        control.write()
        await sensing.until(lambda picture: picture.sensor_restarts > 0 and sensing.process.pid not in (None, first))
        restarted_at = SYSTEM_CLOCK.wall()
        await sensing.until(lambda picture: picture.polled_at > restarted_at)

    play(settings, scene)


def test_repeatedly_hung_driver_is_critical(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: Watched) -> None:
        control.write(gpus={"3": {"hang": True}})
        await sensing.until(
            lambda picture: any(f.kind == "sensor.hung" and f.severity is Severity.CRITICAL for f in picture.findings)
        )

    play(msgspec.structs.replace(settings, hang_timeout_s=0.5, start_timeout_s=1.5), scene)


@pytest.mark.promise("sensor-failure")
def test_stopped_sensor_process_is_reported_and_replaced(settings: SensorSettings) -> None:
    async def scene(sensing: Watched) -> None:
        pid = sensing.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await sensing.until_finding("sensor.hung/nvml")
        await sensing.until(lambda picture: sensing.process.pid not in (None, pid))
        assert not Path(f"/proc/{pid}").exists()

    play(settings, scene)


def test_log_is_read_while_the_driver_hangs(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: Watched) -> None:
        control.write(gpus={"3": {"hang": True}})
        await sensing.until_finding("sensor.hung/nvml")
        write_line(settings, FELL_OFF)
        await sensing.until_finding(XID_79)

    play(settings, scene)


def test_a_killed_sensor_process_is_replaced(settings: SensorSettings) -> None:
    async def scene(sensing: Watched) -> None:
        pid = sensing.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await sensing.until(lambda picture: picture.sensor_restarts == 1 and sensing.process.pid not in (None, pid))

    play(settings, scene)


def test_finding_survives_an_agent_restart_until_reboot(settings: SensorSettings, control: Control) -> None:
    async def raise_it(sensing: Watched) -> None:
        write_line(settings, FELL_OFF)
        await sensing.until_finding(XID_79)

    async def still_there(sensing: Watched) -> None:
        assert XID_79 in {finding.key for finding in sensing.pictures[0].findings}
        assert sensing.process._assessor.xid_history.totals == {}

    async def gone(sensing: Watched) -> None:
        assert sensing.pictures[-1].findings == ()

    play(settings, raise_it)
    assert Path(settings.state_path).stat().st_mode & 0o777 == 0o600
    play(settings, still_there)
    control.write(boot_id="virtual-boot-2")
    play(settings, gone)


def test_line_written_during_agent_absence_is_not_missed(settings: SensorSettings) -> None:
    async def nothing(sensing: Watched) -> None:
        pass

    async def found(sensing: Watched) -> None:
        await sensing.until_finding(XID_79)

    play(settings, nothing)
    write_line(settings, FELL_OFF)
    play(settings, found)


def test_damaged_state_file_is_ignored(settings: SensorSettings) -> None:
    Path(settings.state_path).write_text("{")

    async def scene(sensing: Watched) -> None:
        assert sensing.pictures[-1].findings == ()

    play(settings, scene)


@pytest.mark.promise("sensor-failure")
def test_unreadable_kernel_log_is_a_finding(settings: SensorSettings, tmp_path: Path) -> None:
    async def scene(sensing: Watched) -> None:
        await sensing.until_finding("sensor.failed/kernel-log")
        Path(tmp_path / "later.log").touch()
        await sensing.until_no_finding("sensor.failed/kernel-log")

    play(msgspec.structs.replace(settings, kernel_log=str(tmp_path / "later.log")), scene)


class RefusedLog:
    """A kernel log that may not be opened: nothing comes of it, and it may always hold something new."""

    wait_descriptor = None
    error = "permission denied"
    reads = 0

    def read(self) -> list[str]:
        self.reads += 1
        assert self.reads < 100, "read again and again without a pause"
        return []

    def has_new_data(self) -> bool:
        return True


def test_refused_kernel_log_leaves_the_event_loop_free(settings: SensorSettings) -> None:
    log, patient = RefusedLog(), msgspec.structs.replace(settings, kernel_log_poll_s=3600.0)

    async def scene() -> None:
        monitor = SensorMonitor(patient, SYSTEM_CLOCK, lambda _: None)
        following = asyncio.create_task(monitor._follow_kernel_log(log))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scene())
    assert log.reads == 1


def test_null_device_means_no_kernel_log(settings: SensorSettings) -> None:
    async def scene(sensing: Watched) -> None:
        assert sensing.process._log is None
        assert sensing.pictures[-1].findings == ()

    play(msgspec.structs.replace(settings, kernel_log="/dev/null"), scene)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_sensors_go_on_without_an_unusable_log(settings: SensorSettings, path: str) -> None:
    async def scene(sensing: Watched) -> None:
        picture = await sensing.until_finding("sensor.failed/kernel-log")
        polled_at = picture.polled_at
        await sensing.until(lambda later: later.polled_at > polled_at)
        assert sensing.pictures[-1].sensor_restarts == 0

    play(msgspec.structs.replace(settings, kernel_log=path), scene)


class UnwaitableLog:
    """A log whose descriptor the event loop cannot wait for, which epoll reports as EPERM."""

    error = ""
    reads = 0

    def __init__(self, descriptor: int) -> None:
        self.wait_descriptor = descriptor

    def read(self) -> list[str]:
        self.reads += 1
        return []


def test_log_that_cannot_be_waited_for_is_polled(settings: SensorSettings, tmp_path: Path) -> None:
    quick = msgspec.structs.replace(settings, kernel_log_poll_s=0.0)

    async def scene() -> None:
        with (tmp_path / "file").open("w") as file:
            log = UnwaitableLog(file.fileno())
            monitor = SensorMonitor(quick, SYSTEM_CLOCK, lambda _: None)
            following = asyncio.create_task(monitor._follow_kernel_log(log))  # type: ignore[arg-type]
            while log.reads < 3 and not following.done():
                await asyncio.sleep(0)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            assert log.reads >= 3

    asyncio.run(scene())


def test_sensor_process_ends_with_its_supervisor(settings: SensorSettings, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, msgspec\n"
        "from everstep_agent.sensors.monitor import SensorMonitor\n"
        "from everstep_agent.sensors.monitor import SensorSettings\n"
        "from everstep.system_clock import SYSTEM_CLOCK\n"
        "settings = msgspec.json.decode(sys.argv[1], type=SensorSettings)\n"
        "process = SensorMonitor(settings, SYSTEM_CLOCK, lambda p: p.polled_at and print(process.pid, flush=True))\n"
        "asyncio.run(process.run())\n"
    )
    text = msgspec.json.encode(settings).decode()
    supervisor = subprocess.Popen([sys.executable, "-c", script, text], stdout=subprocess.PIPE, text=True)
    try:
        assert supervisor.stdout is not None
        sensors = int(supervisor.stdout.readline())
    finally:
        supervisor.kill()
        supervisor.communicate()
    deadline = SYSTEM_CLOCK.monotonic() + DEADLINE_S
    while is_running(sensors):
        assert SYSTEM_CLOCK.monotonic() < deadline, f"sensor process {sensors} outlived its supervisor"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"virtual": "nowhere.toml"}, "nowhere.toml"),
        ({"site_policy": ("nowhere.toml",)}, "nowhere.toml"),
    ],
)
def test_contradictory_settings_are_refused(settings: SensorSettings, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SensorMonitor(msgspec.structs.replace(settings, **change), SYSTEM_CLOCK, lambda picture: None)
