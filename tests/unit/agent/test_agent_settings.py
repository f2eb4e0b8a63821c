"""The agent's settings: their sources, and the contradictions that are refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.settings import flat_values
from everstep_agent.config import (
    JOINED_FILE,
    PRESETS,
    PROGRAM,
    AgentSettings,
    read_token,
)
from everstep_agent.main import read_flags
from tests.support.documents.command_lines import agent_settings

NEEDED = ["--node", "n1", "--controller", "http://127.0.0.1:7700", "--run-dir", "/tmp/x", "--token-file", "/tmp/t"]


def parsed(*more: str, **environ: str) -> AgentSettings:
    return agent_settings([*NEEDED, *more], environ)


def changed(**fields: Any) -> AgentSettings:
    return parsed().with_values(**fields)


def test_settings_prefer_option_over_environment_over_preset() -> None:
    environ = {"EVERSTEP_AGENT_METRICS_LISTEN": "127.0.0.1:1111"}
    production = ("--preset", "production")
    assert parsed(*production).metrics.metrics_listen == PRESETS["production"]["metrics_listen"]
    assert parsed(*production, **environ).metrics.metrics_listen == "127.0.0.1:1111"
    assert parsed(*production, "--metrics-listen", "127.0.0.1:2", **environ).metrics.metrics_listen == "127.0.0.1:2"
    assert parsed().metrics.metrics_listen == "127.0.0.1:0"


def test_settings_are_changed_by_name_in_any_part() -> None:
    settings = parsed("--rack", "r1").with_values(node="n2", vault_linger_s=5.0)
    assert (settings.node, settings.shutdown.vault_linger_s, settings.placement.rack) == ("n2", 5.0, "r1")
    assert list(flat_values(settings)) == [setting.path[-1] for setting in PROGRAM.settings.values()]
    with pytest.raises(TypeError, match="linger"):
        settings.with_values(linger=5.0)


def test_unknown_or_unreadable_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="EVERSTEP_AGENT_SPOOL_REPORT: no such setting"):
        parsed(EVERSTEP_AGENT_SPOOL_REPORT="3")
    with pytest.raises(ConfigurationError, match="EVERSTEP_AGENT_SPOOL_MAX_REPORTS: 'many' is not a whole number"):
        parsed(EVERSTEP_AGENT_SPOOL_MAX_REPORTS="many")
    with pytest.raises(ConfigurationError, match="DIE_WITH_PARENT: 'maybe' is not true or false"):
        parsed(EVERSTEP_AGENT_DIE_WITH_PARENT="maybe")


def test_virtual_gpus_disable_the_kernel_log() -> None:
    assert parsed().hardware.kernel_log_path == "/dev/kmsg"
    assert parsed("--virtual", "default:2").hardware.kernel_log_path == ""
    assert parsed("--virtual", "default:2", "--kernel-log", "/tmp/log").hardware.kernel_log_path == "/tmp/log"


@pytest.mark.parametrize(
    ("fields", "mend"),
    [
        ({"node": "a b"}, "--node"),
        ({"watch_units": ("--all",)}, "--watch-units --all is no name"),
        ({"watch_paths": ("/", "scratch")}, "--watch-paths scratch is no absolute path"),
        ({"run_dir": Path("/tmp") / ("x" * 100)}, "shorter --run-dir"),
        ({"virtual_control": Path("/c")}, "--virtual"),
        ({"controllers": ()}, "--controller"),
        ({"controllers": ("127.0.0.1:7700",)}, "http://HOST:PORT"),
        ({"controllers": ("http://a:1/path",)}, "http://HOST:PORT"),
        ({"ca_file": Path("/ca")}, "https"),
        ({"vault_listen": "0.0.0.0:7702"}, "own address"),
        ({"vault_listen": "7702"}, "host:port"),
        ({"vault_memory_limit_bytes": 0}, "no room for any slot"),
        ({"vault_send_bytes_per_s": 1e6}, "at least 4 MiB"),
        ({"metrics_listen": "here"}, "host:port"),
        ({"token_file": None}, "--metrics-token-file"),
        ({"preset": "production", "controllers": ("https://c:1",)}, "--vault-listen 10"),
        ({"report_batch_window_s": 0.0}, "--report-batch-window-s must be more"),
        ({"tick_interval_s": 0.3}, "at least two ticks"),
        ({"unresponsive_after_s": 0.2}, "--unresponsive-after-s"),
        ({"retry_max_idle_s": 0.1}, "--retry-max-idle-s"),
        ({"spool_max_reports": 1}, "--spool-max-reports"),
        ({"spool_max_bytes": 1}, "--spool-max-bytes"),
        ({"vault_linger_s": 0.0}, "--vault-linger-s"),
        ({"vault_survives_kill_of": "agent"}, "--die-with-parent"),
        ({"max_connections": 1}, "--max-connections"),
    ],
)
def test_contradiction_is_refused_with_its_fix(fields: dict[str, Any], mend: str) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        changed(**fields).validate()


def test_token_is_one_word_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigurationError, match="cannot read the agent token file"):
        read_token(file, "agent token")
    for content in (b"", b"\n", b"two words", b"t\xc3\xb6ken", b"\x30\x82\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="does not hold"):
            read_token(file, "agent token")
    file.write_text("agent:n1:mac\n")
    assert read_token(file, "agent token") == "agent:n1:mac"
    assert read_token(None, "agent token") == ""


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_gives_values_of_the_settings_types(preset: str) -> None:
    for name, value in PRESETS[preset].items():
        assert msgspec.convert(value, PROGRAM.settings[name].type) == value


def test_flags_arrive_from_the_child_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep-agent", "--node", "n1", "--vault-linger-s", "inf", "--run-dir", "/r"])
    assert read_flags() == {"node": "n1", "vault_linger_s": math.inf, "run_dir": "/r"}


def test_wrong_flag_ends_with_the_childs_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep-agent", "--no-such-flag"])
    with pytest.raises(SystemExit) as ended:
        read_flags()
    assert ended.value.code == 2


def test_standalone_agent_needs_no_controller_and_no_token(tmp_path: Path) -> None:
    flags = ["--node", "n1", "--run-dir", str(tmp_path)]
    with pytest.raises(ConfigurationError, match="or --standalone to run without one"):
        agent_settings(flags, {})
    assert agent_settings([*flags, "--standalone"], {}).controllers == ()
    with pytest.raises(ConfigurationError, match="/metrics needs a token"):
        agent_settings([*flags, "--standalone", "--metrics-listen", "0.0.0.0:7703"], {})


def test_standalone_agent_starts_with_the_fleet_that_it_joined(tmp_path: Path) -> None:
    flags = ["--node", "n1", "--run-dir", str(tmp_path), "--standalone"]
    (tmp_path / JOINED_FILE).write_text('{"type":"JoinFleet","controllers":["http://c:1/"],"token_file":"/t"}')
    settings = agent_settings(flags, {})
    assert (settings.controllers, settings.credentials.token_file) == (("http://c:1",), Path("/t"))
    assert agent_settings([*flags, "--controller", "http://d:1"], {}).controllers == ("http://d:1",)
    (tmp_path / JOINED_FILE).write_text("{")
    with pytest.raises(ConfigurationError, match="remove it to run without a controller"):
        agent_settings(flags, {})


def test_bundles_survive_a_reboot_unless_the_agent_is_private() -> None:
    assert parsed(STATE_DIRECTORY="/var/lib/x:/y").bundles.bundle_dir == Path("/var/lib/x/bundles")
    assert parsed("--virtual", "default", STATE_DIRECTORY="/var/lib/x").bundles.bundle_dir == Path("/tmp/x/bundles")
