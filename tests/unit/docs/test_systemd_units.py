"""The systemd units' command lines, as the programs take them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documents.command_lines import agent_settings, controller_settings

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"


def settings_of(unit: str) -> dict[str, list[str]]:
    """Each key's values, continued lines joined."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().replace("\\\n", " ").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def command(unit: str) -> list[str]:
    return shlex.split(settings_of(unit)["ExecStart"][0].replace("%H", "node-17").replace("${EVERSTEP_LISTEN}", "h:1"))


def test_agent_unit_command_line_is_accepted() -> None:
    program, *arguments = command("everstep-agent.service")
    assert program.endswith("/everstep-agent")
    environment = {
        "EVERSTEP_AGENT_CONTROLLER": "http://10.0.0.1:7700",
        "EVERSTEP_AGENT_VAULT_LISTEN": "10.0.0.7:7702",
        "EVERSTEP_AGENT_RACK": "r1",
        "EVERSTEP_AGENT_SWITCH": "s1",
        "EVERSTEP_AGENT_POWER_DOMAIN": "p1",
    }
    settings = agent_settings(arguments, environment)
    assert (settings.node, settings.preset, settings.hardware.kernel_log_path) == ("node-17", "production", "/dev/kmsg")


def test_vault_survives_stop_of_the_agent_unit() -> None:
    unit = settings_of("everstep-agent.service")
    assert unit["KillMode"] == ["process"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert "--die-with-parent" not in command("everstep-agent.service")


def test_controller_unit_command_line_is_accepted() -> None:
    program, *arguments = command("everstep-controller.service")
    assert program.endswith("/everstep-controller")
    assert controller_settings(arguments, {}).listeners.listen == "h:1"


def test_agent_unit_hides_nothing_that_the_agent_reads() -> None:
    unit = settings_of("everstep-agent.service")
    hiding = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "ProtectKernelLogs", "ProtectProc"}
    assert not (hiding | {"PrivateIPC", "PrivateTmp", "ProtectHome", "MemoryDenyWriteExecute"}) & unit.keys()
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == ["CAP_SYSLOG"]
    assert unit["ProtectSystem"] == ["full"]  # versions may be written anywhere


@pytest.mark.parametrize("name", ["everstep-agent.service", "everstep-controller.service"])
def test_units_gain_no_privileges(name: str) -> None:
    unit = settings_of(name)
    for key in ("NoNewPrivileges", "ProtectKernelModules", "ProtectKernelTunables", "RestrictSUIDSGID"):
        assert unit[key] == ["true"], key


@pytest.mark.parametrize(("name", "exposure"), [("everstep-agent.service", 6.0), ("everstep-controller.service", 2.5)])
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_valid_and_little_exposed(tmp_path: Path, name: str, exposure: float) -> None:
    text = re.sub(r"/opt/everstep/bin/\S+", "/bin/true", (UNITS / name).read_text())  # the program is not installed
    (tmp_path / name).write_text(text)
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
    verified = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert not [line for line in verified.stderr.splitlines() if name in line]
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={exposure * 10:.0f}",
        str(tmp_path / name),
    ]
    judged = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert judged.returncode == 0, judged.stdout + judged.stderr
