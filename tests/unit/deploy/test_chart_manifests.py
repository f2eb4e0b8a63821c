"""The chart's manifests: whether Kubernetes takes them, and whether they fit together."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.support.helm import (
    CHART,
    CUSTOM,
    NAMESPACE,
    ROOT,
    Manifest,
    check_schema,
    containers,
    engine,
    of_kind,
    pod_specs,
    the,
)

Releases = dict[str, list[Manifest]]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_manifests_fit_the_schemas_of_kubernetes(version: str, releases: Releases) -> None:
    distinct = {json.dumps(one, sort_keys=True): one for release in releases.values() for one in release}
    checked = [one for one in distinct.values() if one["apiVersion"] not in CUSTOM]
    for manifest in checked:
        check_schema(manifest, version)
    assert len(checked) > 40


def test_schema_check_refuses_unknown_fields(releases: Releases) -> None:
    (pod, *_) = of_kind(releases["sqlite"], "DaemonSet")
    wrong: Manifest = json.loads(json.dumps(pod))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(Exception, match="hostPid"):
        check_schema(wrong, "1.37")


def test_helm_lints_the_chart() -> None:
    values = {"image": {"registry": "registry.example/ml"}}
    report = engine().lint(CHART, values, strict=True, skip_schema_validation=False)
    assert report["errors"] == []


def test_manifests_have_unique_names_and_common_labels(releases: Releases) -> None:
    for release in releases.values():
        names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in release]
        assert len(names) == len(set(names))
        for one in release:
            labels = one["metadata"]["labels"]
            assert labels["app.kubernetes.io/name"] == "everstep"
            assert {"helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/component"} <= labels.keys()


def _selected(selector: dict[str, str], release: list[Manifest]) -> list[str]:
    pods = [(one["metadata"]["name"], one["spec"]["template"]["metadata"]["labels"]) for one in workloads(release)]
    return [name for name, labels in pods if selector.items() <= labels.items()]


def workloads(release: list[Manifest]) -> list[Manifest]:
    return of_kind(release, "StatefulSet", "DaemonSet", "Job")


def test_workload_selectors_match_their_own_pods_only(releases: Releases) -> None:
    for release in releases.values():
        for one in of_kind(release, "StatefulSet", "DaemonSet"):
            assert _selected(one["spec"]["selector"]["matchLabels"], release) == [one["metadata"]["name"]]


def test_services_select_controllers_and_real_ports(releases: Releases) -> None:
    for release in releases.values():
        (controller,) = of_kind(release, "StatefulSet")
        (container,) = controller["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        services = of_kind(release, "Service")
        assert controller["spec"]["serviceName"] in [one["metadata"]["name"] for one in services]
        for one in services:
            assert _selected(one["spec"]["selector"], release) == [controller["metadata"]["name"]]
            assert all(ports[port["targetPort"]] == port["port"] for port in one["spec"]["ports"])


def test_disruption_budget_exists_for_several_controllers_only(releases: Releases) -> None:
    assert of_kind(releases["sqlite"], "PodDisruptionBudget") == []
    (budget,) = of_kind(releases["postgresql"], "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert _selected(budget["spec"]["selector"]["matchLabels"], releases["postgresql"]) == ["everstep-controller"]


def test_network_policies_select_pods_and_their_ports(releases: Releases) -> None:
    for name, policies in (("monitored", 1), ("pools", 2)):
        found = of_kind(releases[name], "NetworkPolicy")
        assert len(found) == policies
        ports = {port["name"] for _, _, one in containers(releases[name]) for port in one.get("ports", ())}
        for one in found:
            assert _selected(one["spec"]["podSelector"]["matchLabels"], releases[name])
            for rule in one["spec"]["ingress"]:
                assert {port["port"] for port in rule["ports"]} <= ports
                assert rule["from"], "a rule without peers admits everybody"
                peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
                assert all(_selected(peer, releases[name]) for peer in peers)
    assert all(not of_kind(releases[name], "NetworkPolicy") for name in ("sqlite", "postgresql"))


def test_every_mount_has_its_volume(releases: Releases) -> None:
    for release in releases.values():
        claims = {"data"}
        for name, spec in pod_specs(release):
            volumes = {volume["name"] for volume in spec["volumes"]}
            mounts = {
                mount["name"] for _, other, one in containers(release) if other is spec for mount in one["volumeMounts"]
            }
            assert mounts - claims <= volumes, name
            assert volumes <= mounts, f"{name}: a volume that nobody mounts"
            paths = [tuple(mount["mountPath"] for mount in one["volumeMounts"]) for one in spec["containers"]]
            assert all(len(found) == len(set(found)) for found in paths)


def test_service_accounts_and_config_maps_exist(releases: Releases) -> None:
    for release in releases.values():
        accounts = {one["metadata"]["name"] for one in of_kind(release, "ServiceAccount")}
        maps = {one["metadata"]["name"] for one in of_kind(release, "ConfigMap")}
        for _, spec in pod_specs(release):
            assert spec["serviceAccountName"] in accounts
            assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} <= maps
        for one in of_kind(release, "RoleBinding", "ClusterRoleBinding"):
            assert one["subjects"][0]["name"] in accounts
            assert one["subjects"][0]["namespace"] == NAMESPACE
            the(release, one["roleRef"]["kind"], one["roleRef"]["name"])


def test_monitors_are_off_by_default(releases: Releases) -> None:
    assert [one for one in releases["sqlite"] if one["apiVersion"] in CUSTOM] == []


@pytest.mark.parametrize(("kind", "component"), [("ServiceMonitor", "controller"), ("PodMonitor", "agent")])
def test_monitors_scrape_named_ports_with_a_token(kind: str, component: str, releases: Releases) -> None:
    release = releases["monitored"]
    (monitor,) = of_kind(release, kind)
    (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
    labels = monitor["spec"]["selector"]["matchLabels"]
    if kind == "ServiceMonitor":
        (service,) = [one for one in of_kind(release, "Service") if labels.items() <= one["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["tlsConfig"]["serverName"] == f"{service['metadata']['name']}.{NAMESPACE}.svc"
    else:
        assert _selected(labels, release) == ["everstep-agent-gpu"]
        ports = {port["name"] for _, _, one in containers(release) for port in one.get("ports", ())}
    assert endpoint["port"] in ports
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"] == {"credentials": {"name": "everstep-metrics", "key": component}}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"everstep-{component}"}]


def test_prometheus_rule_holds_the_shipped_alerts(releases: Releases) -> None:
    shipped = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "everstep.rules.yml").read_text())
    (rule,) = of_kind(releases["monitored"], "PrometheusRule")
    assert rule["spec"] == shipped
    jobs = set(re.findall(r'job="([\w-]+)"', json.dumps(shipped).replace("\\", "")))
    assert jobs <= {"everstep-controller", "everstep-agent"}, "the monitors set these"


def test_dashboards_are_the_shipped_ones(releases: Releases) -> None:
    files = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
    assert len(files) == 4
    for file in files:
        found: Any = the(releases["monitored"], "ConfigMap", f"everstep-dashboard-{file.stem}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(found["data"][file.name]) == json.loads(file.read_text())


def test_chart_has_the_version_of_the_project() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert metadata["version"] == metadata["appVersion"] == project[1]
