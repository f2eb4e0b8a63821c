"""Rights of the chart's pods, and where secrets can be seen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.services.helm import Manifest, containers, of_kind, pod_specs

Releases = dict[str, list[Manifest]]
ROOT_CONTAINERS = {"prepare-directories": ["CHOWN"], "kernel-log": None}
"""Containers that run as root, with their capabilities; None for all. Their reasons stand in templates/agent.yaml."""


def test_only_the_stated_containers_run_as_root(releases: Releases) -> None:
    for release in releases.values():
        for name, spec, container in containers(release):
            security = {**spec["securityContext"], **container["securityContext"]}
            assert security["readOnlyRootFilesystem"], name
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            if container["name"] in ROOT_CONTAINERS:
                continue
            assert security["runAsNonRoot"], name
            assert security["runAsUser"] == security["runAsGroup"] == 10001
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["allowPrivilegeEscalation"] is False
            assert "privileged" not in security


def test_root_containers_have_the_stated_rights_and_no_secrets(releases: Releases) -> None:
    found: dict[str, Any] = {}
    for _, _, container in containers(releases["sqlite"]):
        security = container["securityContext"]
        if security.get("runAsUser") == 0:
            found[container["name"]] = security["capabilities"]["add"] if "capabilities" in security else None
            assert security.get("privileged", False) == (container["name"] == "kernel-log")
            assert "secrets" not in [mount["name"] for mount in container["volumeMounts"]]
    assert found == ROOT_CONTAINERS


def test_only_agents_see_the_node(releases: Releases) -> None:
    for release in releases.values():
        for name, spec in pod_specs(release):
            of_agent = name.startswith("DaemonSet/")
            assert spec.get("hostPID", False) == of_agent
            assert bool([volume for volume in spec["volumes"] if "hostPath" in volume]) == of_agent
            if not of_agent:
                assert not spec.get("hostNetwork")


def test_agents_on_the_pod_network_see_the_nodes_ports(releases: Releases) -> None:
    for key, sees_sys in (("pools", True), ("sqlite", False), ("virtual", False)):
        agents = [container for _, _, container in containers(releases[key]) if container["name"] == "agent"]
        assert agents
        for agent in agents:
            mounts = [mount for mount in agent["volumeMounts"] if mount["mountPath"] == "/host/sys"]
            assert mounts == ([{"name": "host-sys", "mountPath": "/host/sys", "readOnly": True}] if sees_sys else [])
            variables = {variable["name"]: variable.get("value") for variable in agent["env"]}
            assert variables.get("EVERSTEP_AGENT_SYSFS_ROOT") == ("/host/sys" if sees_sys else None)


def test_only_pods_that_call_kubernetes_hold_its_token(releases: Releases) -> None:
    for key, release in releases.items():
        holders = {name.partition("/")[0] for name, spec in pod_specs(release) if spec["automountServiceAccountToken"]}
        expected = {"Job"} if key != "plain" else set()
        assert holders == expected | ({"StatefulSet"} if key == "monitored" else set()), key
        assert all(manifest["automountServiceAccountToken"] is False for manifest in of_kind(release, "ServiceAccount"))


def test_secrets_job_may_only_read_its_own_secrets(releases: Releases) -> None:
    for manifest in of_kind(releases["sqlite"], "Role"):
        for rule in manifest["rules"]:
            assert rule["resources"] == ["secrets"]
            assert rule["verbs"] == (["get"] if "resourceNames" in rule else ["create"])
    assert of_kind(releases["plain"], "Job", "Role") == [], "nothing is made with secrets.create=false"


def test_release_contains_no_secret(releases: Releases) -> None:
    for release in releases.values():
        assert of_kind(release, "Secret") == []
        for name, _, container in containers(release):
            text = " ".join([*container.get("command", ()), *container.get("args", ())])
            assert not re.search(r"//[^/@ ]*:[^/@ ]*@", text), f"{name}: a password in a URL"
            for variable in container.get("env", ()):
                if re.search("PASSWORD|SECRET|TOKEN|DATABASE$", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable["name"]


def test_fleet_secret_is_copied_for_the_controller_alone(releases: Releases) -> None:
    for release in releases.values():
        (found,) = [spec for name, spec in pod_specs(release) if name.startswith("StatefulSet/")]
        (copies,) = [container for container in found["initContainers"] if container["name"] == "copy-secrets"]
        assert "umask 077" in copies["command"][-1]
        mounts = {mount["mountPath"] for mount in found["containers"][0]["volumeMounts"]}
        assert "/private" in mounts
        assert "/secrets" not in mounts, "the kubelet makes those readable for the group"


@pytest.mark.parametrize("key", ["requests", "limits"])
def test_containers_state_their_resources(key: str, releases: Releases) -> None:
    for release in releases.values():
        for name, _, container in containers(release):
            if key == "limits" and container["name"] == "agent":
                assert "limits" not in container["resources"], "checkpoints count as its memory"
            else:
                assert "memory" in container["resources"][key], name
