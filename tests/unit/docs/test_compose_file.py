"""docker-compose.yml and its mounted files, as the programs parse them, without a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.bearer_tokens import Identity, TokenRole, verify_with_secret
from everstep_agent.config import read_token
from everstep_controller.config import read_password, read_secret
from tests.support.documents.command_lines import agent_settings, controller_settings

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
AGENTS = [name for name in SERVICES if name.startswith("agent-")]
CONTROLLERS = [name for name in SERVICES if name.startswith("controller")]
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


@pytest.mark.parametrize("name", AGENTS)
def test_compose_agent_settings_are_valid(name: str) -> None:
    settings = agent_settings(SERVICES[name]["command"], {})
    assert settings.node == name
    assert settings.vault.vault_listen.partition(":")[0] == name, "its peers reach the vault by the service's name"


@pytest.mark.parametrize("name", CONTROLLERS)
def test_compose_controller_settings_are_valid(name: str) -> None:
    settings = controller_settings(SERVICES[name]["command"], SERVICES[name]["environment"])
    assert settings.storage.database_password_file
    assert settings.leadership.advertise == f"{name}:7700", "others find it by the service's name"
    assert not settings.policy.probes.required, "the agents' image has no torch, and no node would come back"


@pytest.mark.parametrize("name", SERVICES)
def test_every_compose_service_has_a_health_check(name: str) -> None:
    service = SERVICES[name]
    assert "healthcheck" in service or "HEALTHCHECK" in stage(service["build"]["target"])


def stage(target: str) -> str:
    """The part of the Dockerfile that makes ``target``."""
    return re.split(r"^FROM ", DOCKERFILE.split(f" AS {target}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", SERVICES)
def test_every_published_port_is_on_loopback(name: str) -> None:
    assert all(str(port).startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


def test_compose_secrets_are_ignored_by_git_and_granted() -> None:
    files = [Path(secret["file"]) for secret in COMPOSE["secrets"].values()]
    assert all(file.parent == Path("deploy/secrets") for file in files)
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"deploy/secrets/", "/.env"} <= set(ignored)
    for name, service in SERVICES.items():
        read = set(re.findall(r"/run/secrets/([\w-]+)", str(service)))
        assert read == set(service.get("secrets", [])) & read, f"{name} reads a secret that it is not granted"
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()


def test_compose_file_contains_no_secret() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN", variable):
                assert variable.endswith("_FILE"), f"{name}: {variable}"
                assert value.startswith("/run/secrets/"), f"{name}: {variable}"
    for url in re.findall(r"\w+://[^\s\"']+", (ROOT / "docker-compose.yml").read_text()):
        assert not re.search(r"//[^/@]*:[^/@]*@", url), f"a password in {url}"


def test_prometheus_scrapes_the_listening_ports() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    listens = [agent_settings(SERVICES[name]["command"], {}).metrics.metrics_listen for name in AGENTS]
    assert jobs["everstep-agent"]["static_configs"][0]["targets"] == [
        f"{name}:{at.rpartition(':')[2]}" for name, at in zip(AGENTS, listens, strict=True)
    ]
    (found,) = jobs["everstep-controller"]["dns_sd_configs"]
    assert (found["names"], found["port"]) == (CONTROLLERS, 7700)
    for name in ("prometheus", "grafana"):
        for mount in SERVICES[name].get("volumes", []):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() or source in COMPOSE["volumes"], mount


@pytest.mark.slow
def test_make_secrets_writes_usable_files(tmp_path: Path) -> None:
    """The owner runs the script; the containers' users read files in a directory that only the owner enters."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("secrets"))
    command = tmp_path / "everstep-controller"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m everstep_controller.main "$@"\n')
    command.chmod(0o700)
    environment = {**os.environ, "CONTROLLER_COMMAND": str(command), "PYTHONPATH": str(ROOT)}
    run = [str(tmp_path / "deploy" / "make-secrets.sh")]
    subprocess.run(run, check=True, capture_output=True, env=environment)
    folder = tmp_path / "deploy" / "secrets"
    first = {file.name: file.read_text() for file in folder.iterdir()}
    subprocess.run(run, check=True, capture_output=True, env=environment)
    assert {file.name: file.read_text() for file in folder.iterdir()} == first, "a second run changes no secret"

    assert {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()} <= first.keys()
    assert folder.stat().st_mode & 0o777 == 0o700
    secret = read_secret(str(folder / "fleet"))
    assert read_password(str(folder / "postgres"))
    assert len(set(first.values())) == len(first), "no two are alike"
    for name in AGENTS:
        token = read_token(folder / f"token-{name}", "agent token")
        assert verify_with_secret((secret,), token)[0] == Identity(TokenRole.AGENT, name)
    assert verify_with_secret((secret,), first["token-prometheus"].strip())[0].role is TokenRole.VIEWER
    assert (tmp_path / ".env").read_text() == f"EVERSTEP_UID={os.getuid()}\nEVERSTEP_GID={os.getgid()}\n"
