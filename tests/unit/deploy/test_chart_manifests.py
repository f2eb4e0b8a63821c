"""The chart's manifests: Kubernetes accepts them, and their references match."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.support.services.helm import (
    CHART,
    CUSTOM,
    NAMESPACE,
    ROOT,
    Manifest,
    check_schema,
    containers,
    engine,
    manifest_named,
    of_kind,
    pod_specs,
)

Releases = dict[str, list[Manifest]]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_manifests_fit_the_schemas_of_kubernetes(version: str, releases: Releases) -> None:
    distinct = {json.dumps(manifest, sort_keys=True): manifest for release in releases.values() for manifest in release}
    checked = [manifest for manifest in distinct.values() if manifest["apiVersion"] not in CUSTOM]
    for manifest in checked:
        check_schema(manifest, version)
    assert len(checked) > 40


def test_helm_lints_the_chart() -> None:
    values = {"image": {"registry": "registry.example/ml"}}
    report = engine().lint(CHART, values, strict=True, skip_schema_validation=False)
    assert report["errors"] == []


def _selected(selector: dict[str, str], release: list[Manifest]) -> list[str]:
    pods = [
        (manifest["metadata"]["name"], manifest["spec"]["template"]["metadata"]["labels"])
        for manifest in workloads(release)
    ]
    return [name for name, labels in pods if selector.items() <= labels.items()]


def workloads(release: list[Manifest]) -> list[Manifest]:
    return of_kind(release, "StatefulSet", "DaemonSet", "Job")


def test_workload_selectors_match_their_own_pods_only(releases: Releases) -> None:
    for release in releases.values():
        for manifest in of_kind(release, "StatefulSet", "DaemonSet"):
            assert _selected(manifest["spec"]["selector"]["matchLabels"], release) == [manifest["metadata"]["name"]]


def test_services_select_controllers_and_real_ports(releases: Releases) -> None:
    for release in releases.values():
        (controller,) = of_kind(release, "StatefulSet")
        (container,) = controller["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        services = of_kind(release, "Service")
        assert controller["spec"]["serviceName"] in [manifest["metadata"]["name"] for manifest in services]
        for manifest in services:
            assert _selected(manifest["spec"]["selector"], release) == [controller["metadata"]["name"]]
            assert all(ports[port["targetPort"]] == port["port"] for port in manifest["spec"]["ports"])


def test_disruption_budget_exists_for_several_controllers_only(releases: Releases) -> None:
    assert of_kind(releases["sqlite"], "PodDisruptionBudget") == []
    (budget,) = of_kind(releases["postgresql"], "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert _selected(budget["spec"]["selector"]["matchLabels"], releases["postgresql"]) == ["everstep-controller"]


def test_network_policies_select_pods_and_their_ports(releases: Releases) -> None:
    for name, policies in (("monitored", 1), ("pools", 2)):
        found = of_kind(releases[name], "NetworkPolicy")
        assert len(found) == policies
        ports = {port["name"] for _, _, container in containers(releases[name]) for port in container.get("ports", ())}
        for manifest in found:
            assert _selected(manifest["spec"]["podSelector"]["matchLabels"], releases[name])
            for rule in manifest["spec"]["ingress"]:
                assert {port["port"] for port in rule["ports"]} <= ports
                assert rule["from"], "a rule without peers would admit all pods"
                peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
                assert all(_selected(peer, releases[name]) for peer in peers)
    assert all(not of_kind(releases[name], "NetworkPolicy") for name in ("sqlite", "postgresql"))


def test_every_mount_has_its_volume(releases: Releases) -> None:
    for release in releases.values():
        claims = {"data"}
        for name, spec in pod_specs(release):
            volumes = {volume["name"] for volume in spec["volumes"]}
            mounts = {
                mount["name"]
                for _, other, container in containers(release)
                if other is spec
                for mount in container["volumeMounts"]
            }
            assert mounts - claims <= volumes, name
            assert volumes <= mounts, f"{name}: no container mounts the volume"
            paths = [
                tuple(mount["mountPath"] for mount in container["volumeMounts"]) for container in spec["containers"]
            ]
            assert all(len(found) == len(set(found)) for found in paths)


def test_service_accounts_and_config_maps_exist(releases: Releases) -> None:
    for release in releases.values():
        accounts = {manifest["metadata"]["name"] for manifest in of_kind(release, "ServiceAccount")}
        maps = {manifest["metadata"]["name"] for manifest in of_kind(release, "ConfigMap")}
        for _, spec in pod_specs(release):
            assert spec["serviceAccountName"] in accounts
            assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} <= maps
        for manifest in of_kind(release, "RoleBinding", "ClusterRoleBinding"):
            assert manifest["subjects"][0]["name"] in accounts
            assert manifest["subjects"][0]["namespace"] == NAMESPACE
            manifest_named(release, manifest["roleRef"]["kind"], manifest["roleRef"]["name"])


@pytest.mark.parametrize(("kind", "component"), [("ServiceMonitor", "controller"), ("PodMonitor", "agent")])
def test_monitors_scrape_named_ports_with_a_token(kind: str, component: str, releases: Releases) -> None:
    release = releases["monitored"]
    (monitor,) = of_kind(release, kind)
    (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
    labels = monitor["spec"]["selector"]["matchLabels"]
    if kind == "ServiceMonitor":
        (service,) = [
            manifest
            for manifest in of_kind(release, "Service")
            if labels.items() <= manifest["metadata"]["labels"].items()
        ]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["tlsConfig"]["serverName"] == f"{service['metadata']['name']}.{NAMESPACE}.svc"
    else:
        assert _selected(labels, release) == ["everstep-agent-gpu"]
        ports = {port["name"] for _, _, container in containers(release) for port in container.get("ports", ())}
    assert endpoint["port"] in ports
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"] == {"credentials": {"name": "everstep-metrics", "key": component}}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"everstep-{component}"}]


def test_chart_has_the_version_of_the_project() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert metadata["version"] == metadata["appVersion"] == project[1]
