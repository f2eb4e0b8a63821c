from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.findings import assessment
from everstep_agent.findings.monitor import SensorMonitor, SensorSettings
from everstep_agent.node_profile import profile
from everstep_agent.node_profile.store import ACCEPT_FILE, order_acceptance
from tests.support.agents.sensors import BUS, FELL_OFF, Control, RunningMonitor, running_monitor

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
        virtual_folder=str(tmp_path / "machine"),
        kernel_log=str(log),
        state_path=str(tmp_path / "sensors.json"),
        interval_s=0.1,
        hang_timeout_s=1.0,
        restart_floor_s=0.05,
        restart_ceiling_s=0.2,
    )


def play(settings: SensorSettings, scene: Callable[[RunningMonitor], Awaitable[Any]]) -> Any:
    async def act() -> Any:
        async with running_monitor(settings) as sensing:
            await sensing.until(lambda report: bool(report.polled_at))
            return await scene(sensing)

    return asyncio.run(act())


def write_line(settings: SensorSettings, line: str) -> None:
    with open(settings.kernel_log, "a") as file:
        file.write(line + "\n")


def test_gpu_off_the_bus_is_found_in_log_and_cleared_by_reset(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        write_line(settings, FELL_OFF)
        report = await sensing.until_finding(XID_79)
        (finding,) = report.findings
        assert finding.severity is Severity.CRITICAL
        assert Action.strongest(finding.action, Action.DRAIN) is finding.action
        assert finding.evidence["uuid"] == report.poll.known_gpus[0].uuid
        control.write(gpus={"0": {"reset_at": SYSTEM_CLOCK.wall()}})
        assert (await sensing.until_no_finding(XID_79)).findings == ()

    play(settings, scene)


def test_kernel_line_is_processed_before_the_next_poll(settings: SensorSettings) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        polled_at = sensing.reports[-1].polled_at
        write_line(settings, FELL_OFF)
        assert (await sensing.until_finding(XID_79)).polled_at == polled_at

    play(msgspec.structs.replace(settings, interval_s=3600.0), scene)


def test_control_file_sets_xid_loss_and_boot_id(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        control.write(gpus={"0": {"xid": 79, "lost": True}})
        await sensing.until_finding(f"gpu.lost/{BUS}")
        report = await sensing.until_finding(XID_79)
        assert report.poll.gpus[0].lost
        assert len(report.poll.gpus) == 8
        control.write(boot_id="virtual-boot-2")
        report = await sensing.until_no_finding(XID_79)
        assert report.poll.boot_id == "virtual-boot-2"

    play(settings, scene)


@pytest.mark.promise("sensor-failure")
def test_hung_gpu_is_named_while_the_others_are_read(settings: SensorSettings, control: Control) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        first = sensing.process.pid
        control.write(gpus={"3": {"hang": True}})
        report = await sensing.until_finding("sensor.hung/0000:61:00")
        (finding,) = report.findings
        assert "gpu 3 at 0000:61:00" in finding.message
        assert report.poll.gpus[3].temperatures.temperature_c is None
        control.write(gpus={"3": {"hang": True}, "5": {"lost": True}}, ports={"mlx5_0": {"errors": 7}})
        report = await sensing.until_finding("gpu.lost/0000:c3:00")
        report = await sensing.until(lambda report: any(port.errors == 7 for port in report.poll.ports))
        assert "sensor.hung/0000:61:00" in {finding.key for finding in report.findings}
        control.write()
        report = await sensing.until(lambda report: report.poll.gpus[3].temperatures.temperature_c is not None)
        assert (sensing.process.pid, report.sensor_restarts) == (first, 0)

    play(settings, scene)


def test_nvml_is_let_go_while_the_hold_file_exists(settings: SensorSettings, tmp_path: Path) -> None:
    hold = tmp_path / "nvml-pause"

    async def scene(sensing: RunningMonitor) -> None:
        hold.touch()
        report = await sensing.until(lambda report: all(gpu.is_closed for gpu in report.poll.gpus))
        assert len(report.poll.gpus) == 8
        assert report.findings == ()
        hold.unlink()
        await sensing.until(lambda report: all(gpu.temperatures.temperature_c for gpu in report.poll.gpus))

    play(msgspec.structs.replace(settings, pause_file=str(hold)), scene)


@pytest.mark.promise("sensor-failure")
def test_stopped_sensor_process_is_reported_and_replaced(settings: SensorSettings) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        pid = sensing.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await sensing.until_finding("sensor.hung/nvml")
        await sensing.until(lambda report: sensing.process.pid not in (None, pid))
        assert not Path(f"/proc/{pid}").exists()

    play(settings, scene)


def test_finding_survives_an_agent_restart_until_reboot(settings: SensorSettings, control: Control) -> None:
    async def raise_it(sensing: RunningMonitor) -> None:
        write_line(settings, FELL_OFF)
        await sensing.until_finding(XID_79)

    async def still_there(sensing: RunningMonitor) -> None:
        assert XID_79 in {finding.key for finding in sensing.reports[0].findings}
        assert sensing.process._assessor.xid_history.totals == {}

    async def gone(sensing: RunningMonitor) -> None:
        assert sensing.reports[-1].findings == ()

    play(settings, raise_it)
    assert Path(settings.state_path).stat().st_mode & 0o777 == 0o600
    play(settings, still_there)
    control.write(boot_id="virtual-boot-2")
    play(settings, gone)


@pytest.mark.promise("sensor-failure")
def test_unreadable_kernel_log_is_a_finding(settings: SensorSettings, tmp_path: Path) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        await sensing.until_finding("sensor.failed/kernel-log")
        Path(tmp_path / "later.log").touch()
        await sensing.until_no_finding("sensor.failed/kernel-log")

    play(msgspec.structs.replace(settings, kernel_log=str(tmp_path / "later.log")), scene)


def test_broken_policy_is_a_finding_until_mended(settings: SensorSettings, tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text("# none yet\n")

    async def scene(sensing: RunningMonitor) -> None:
        file.write_text("[[rule]]\nid = 'x'\n")
        report = await sensing.until_finding("sensor.failed/policy")
        (finding,) = report.findings
        assert f"{file} line 1" in finding.message
        assert not report.is_policy_current
        file.write_text('[[rule]]\nid = "gpu-lost"\nmode = "observe"\nsource = "ticket"\n')
        report = await sensing.until_no_finding("sensor.failed/policy")
        assert report.is_policy_current

    async def restarted(sensing: RunningMonitor) -> None:
        assert "sensor.failed/policy" in {finding.key for finding in sensing.reports[0].findings}

    watching = msgspec.structs.replace(settings, site_policy=(str(file),), policy_check_s=0.05)
    play(watching, scene)
    file.write_text("")
    play(watching, restarted)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_sensors_go_on_without_an_unusable_log(settings: SensorSettings, path: str) -> None:
    async def scene(sensing: RunningMonitor) -> None:
        report = await sensing.until_finding("sensor.failed/kernel-log")
        polled_at = report.polled_at
        await sensing.until(lambda later: later.polled_at > polled_at)
        assert sensing.reports[-1].sensor_restarts == 0

    play(msgspec.structs.replace(settings, kernel_log=path), scene)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"virtual": "nowhere.toml"}, "nowhere.toml"),
        ({"site_policy": ("nowhere.toml",)}, "nowhere.toml"),
    ],
)
def test_contradictory_settings_are_refused(settings: SensorSettings, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SensorMonitor(msgspec.structs.replace(settings, **change), SYSTEM_CLOCK, lambda report: None)


def test_faults_from_before_the_start_are_found_by_profile(
    settings: SensorSettings, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "LEARN_S", 0.0)
    monkeypatch.setattr(assessment, "PROFILE_INTERVAL_S", 0.1)
    settings = msgspec.structs.replace(settings, profile_folder=str(tmp_path))

    async def learn(sensing: RunningMonitor) -> None:
        await sensing.until(lambda report: len(sensing.reports) > 6)
        assert {finding.severity for finding in sensing.reports[-1].findings} <= {Severity.INFO}  # GPU 0 and its peers

    async def find(sensing: RunningMonitor) -> None:
        wanted = {f"gpu.nvlink/{BUS}", "gpu.lost/gpus", "network.port_down/mlx5_1/1", "node.changed/memory"}
        report = await sensing.until(lambda report: wanted <= {finding.key for finding in report.findings})
        assert Mode.ENFORCE not in {finding.mode for finding in report.findings}
        order_acceptance(tmp_path, [])
        await sensing.until(lambda report: not (tmp_path / ACCEPT_FILE).exists())

    play(settings, learn)
    gpus = {"0": {"nvlinks_down": 18}, "7": {"missing": True}}
    control.write(gpus=gpus, ports={"mlx5_1": {"missing": True}}, host={"memory_total_bytes": 1 << 40})
    play(settings, find)
    play(settings, learn)
