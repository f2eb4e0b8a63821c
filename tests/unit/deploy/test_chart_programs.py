"""The chart's command lines, variables and probes, as the programs parse them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from everstep.settings import Program
from everstep.vocabulary import Mode
from everstep_agent.config import PROGRAM as AGENT
from everstep_agent.config import AgentSettings
from everstep_controller.config import PROGRAM as CONTROLLER
from everstep_controller.config import ControllerSettings
from tests.support.documents.command_lines import agent_settings, controller_settings
from tests.support.services.helm import (
    Manifest,
    chart,
    command_line,
    containers,
    environment,
    notes,
    of_kind,
    render,
)

Releases = dict[str, list[Manifest]]
CLUSTER = {
    "POD_NAME": "everstep-controller-1",
    "POD_IP": "10.0.3.7",
    "NODE_NAME": "gpu-17.example.com",
    "EVERSTEP_CONTROLLER_DATABASE": "postgresql://everstep@db/everstep",
}
"""What the kubelet puts into variables."""


def agents(release: list[Manifest]) -> list[Manifest]:
    return [container for name, _, container in containers(release) if name.endswith("/agent")]


def the_controller(release: list[Manifest]) -> Manifest:
    (found,) = [container for name, _, container in containers(release) if name.endswith("/controller")]
    return found


def controller_of(release: list[Manifest]) -> ControllerSettings:
    return _controller_settings(*_started(the_controller(release)))


def agents_of(release: list[Manifest]) -> list[AgentSettings]:
    return [_agent_settings(*_started(container)) for container in agents(release)]


def _started(container: Manifest) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    return tuple(command_line(container, CLUSTER)), tuple(environment(container, CLUSTER).items())


@cache
def _controller_settings(words: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> ControllerSettings:
    assert words[0] == "everstep-controller"
    return controller_settings(words[1:], dict(variables))


@cache
def _agent_settings(words: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> AgentSettings:
    assert words[0] == "everstep-agent"
    return agent_settings(words[1:], dict(variables))


def test_controller_accepts_its_command_line(releases: Releases) -> None:
    for release in releases.values():
        settings = controller_of(release)
        assert settings.preset == "production"
        assert settings.leadership.advertise.startswith("everstep-controller-1.")
        assert settings.listeners.address == ("0.0.0.0", 7700)
        assert settings.listeners.operators_address == ("0.0.0.0", 7701)


def test_agents_accept_their_command_line(releases: Releases) -> None:
    for release in releases.values():
        for settings in agents_of(release):
            assert settings.node == "gpu-17.example.com"
            assert settings.vault.vault_listen == "10.0.3.7:7702"
            assert settings.metrics.metrics_listen == "10.0.3.7:7703"
            assert settings.credentials.token_file is not None
            assert settings.resolved_segment_dir.as_posix() == "/dev/shm/everstep/gpu-17.example.com"


def test_tls_is_on_by_default_and_can_be_off(releases: Releases) -> None:
    secure, plain = controller_of(releases["sqlite"]), controller_of(releases["plain"])
    assert (secure.tls.tls_certificate, secure.tls.tls_key) == ("/tls/tls.crt", "/tls/tls.key")
    assert plain.tls.tls_certificate == ""
    assert [probe.scheme for probe in map(_Probe, probes(releases["plain"]))] == ["HTTP"] * 3
    assert all(url.startswith("http://") for settings in agents_of(releases["plain"]) for url in settings.controllers)
    assert "WARNING" in notes({"tls": {"enabled": False}})
    assert "WARNING" not in notes()


def test_databases_of_the_controller(releases: Releases) -> None:
    assert controller_of(releases["sqlite"]).storage.database == "sqlite:////var/lib/everstep/controller.sqlite"
    assert controller_of(releases["postgresql"]).storage.database == CLUSTER["EVERSTEP_CONTROLLER_DATABASE"]
    assert controller_of(releases["password"]).storage.database_password_file == "/private/database-password"
    assert [
        bool(manifest["spec"].get("volumeClaimTemplates")) for manifest in of_kind(releases["sqlite"], "StatefulSet")
    ] == [True]
    assert [
        bool(manifest["spec"].get("volumeClaimTemplates")) for manifest in of_kind(releases["password"], "StatefulSet")
    ] == [False]


def test_remediation_and_alerts_reach_the_controller(releases: Releases) -> None:
    settings = controller_of(releases["monitored"])
    assert settings.remediation.remediation_backend == "kubernetes"
    assert settings.remediation.kubernetes_evict_pods
    assert settings.policy.remediation.mode is Mode.ENFORCE
    assert settings.notifications.alert_token_file == "/private/alerts"
    assert controller_of(releases["sqlite"]).policy.remediation.mode is Mode.RECOMMEND


@pytest.mark.parametrize(("name", "program"), [("controller", CONTROLLER), ("agent", AGENT)])
def test_managed_settings_are_those_the_chart_sets(name: str, program: Program, releases: Releases) -> None:
    """Managed settings are refused in ``settings``, where they would have no effect."""
    (checks,) = [template["data"] for template in chart().templates if template["name"] == "templates/_checks.tpl"]
    listed = set(checks.partition(f'define "everstep.managed.{name}" -}}}}\n')[2].partition("\n")[0].split())
    found: set[str] = set()
    for key, release in releases.items():
        for container in [the_controller(release)] if name == "controller" else agents(release):
            flags = [word for word in container["args"] if word.startswith("--")]
            found |= {word[2:].partition("=")[0].replace("-", "_") for word in flags}
            if key != "pools":  # which has settings of its own
                variables = [each for each in environment(container, {}) if each.startswith(program.prefix)]
                found |= {each.removeprefix(program.prefix).lower() for each in variables}
    assert listed == found
    assert listed <= program.settings.keys()


class _Probe:
    def __init__(self, probe: dict[str, Any]) -> None:
        self.path = probe["httpGet"]["path"]
        self.port = probe["httpGet"]["port"]
        self.scheme = probe["httpGet"]["scheme"]


def probes(release: list[Manifest]) -> list[dict[str, Any]]:
    container = the_controller(release)
    return [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]


def test_standby_controllers_count_as_ready(releases: Releases) -> None:
    """Else no rolling update would end. A single controller is ready when it serves."""
    readiness = {name: _Probe(probes(releases[name])[2]).path for name in ("sqlite", "postgresql")}
    assert readiness == {"sqlite": "/readyz", "postgresql": "/healthz"}
    assert all(_Probe(probes(release)[1]).path == "/healthz" for release in releases.values())


def test_agents_have_no_liveness_probe(releases: Releases) -> None:
    for release in releases.values():
        for container in agents(release):
            assert "livenessProbe" not in container
            assert container["readinessProbe"]["tcpSocket"] == {"port": "metrics"}


@pytest.mark.parametrize(
    ("value", "message"), [({"nodes": 1}, "EVERSTEP_AGENT_NODE`"), ({"spool_max_reports": 1}, "64")]
)
def test_unknown_settings_stop_the_agent_with_a_hint(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agents_of(render({"agent": {"settings": value}}))
