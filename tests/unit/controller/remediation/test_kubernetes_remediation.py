"""Kubernetes: the owner of a cordon, foreign taints that stay, and the pods that are evicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.errors import Conflict, Unavailable
from everstep_controller.core.effects import RemediationKind
from everstep_controller.remediation.kubernetes import KubernetesRemediator
from everstep_controller.remediation.remediator import CordonStatus
from tests.support.fleet.remediations import apply_and_wait, remediation
from tests.support.services import kube


@pytest.fixture
def cluster() -> Iterator[kube.Cluster]:
    made = kube.Cluster("n1", "n2")
    yield made
    made.close()


@pytest.mark.slow
def test_kubernetes_keeps_foreign_taints_and_posts_one_event(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    made.apply(remediation(1))
    made.apply(remediation(1))
    node = cluster.nodes["n1"]
    assert node["spec"]["unschedulable"]
    assert [taint["key"] for taint in node["spec"]["taints"]] == ["nvidia.com/gpu", "everstep.dev/quarantined"]
    assert node["metadata"]["annotations"]["site"] == "a"
    assert [event["reason"] for event in cluster.events.values()] == ["EverstepCordon"]
    made.apply(remediation(2, RemediationKind.UNCORDON))
    assert node["spec"] == {"unschedulable": False, "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert node["metadata"]["annotations"] == {"site": "a"}


def test_kubernetes_evicts_pods_except_daemons_and_static_pods(cluster: kube.Cluster) -> None:
    cluster.add_pod("trainer", "n1")
    cluster.add_pod("agent", "n1", owner="DaemonSet")
    cluster.add_pod("static", "n1", owner="Node", **{"kubernetes.io/config.mirror": "a hash"})
    cluster.add_pod("other", "n2")
    made = KubernetesRemediator(cluster.api(), evict=True)
    made.apply(remediation(1))
    assert made.is_done(remediation(1))
    assert set(cluster.pods) == {"agent", "static", "other"}


def test_kubernetes_confirms_reboot_by_new_boot_id(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    made.apply(remediation(1, RemediationKind.REBOOT))
    made.apply(remediation(1, RemediationKind.REBOOT))
    assert sum(1 for method, _, _ in cluster.calls if method == "PATCH") == 1
    assert not made.is_done(remediation(1, RemediationKind.REBOOT))
    cluster.boot("n1", "boot-2")
    assert made.is_done(remediation(1, RemediationKind.REBOOT))


@pytest.mark.promise("holds-respected")
def test_kubernetes_respects_foreign_cordon_after_own_was_lifted(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    made.apply(remediation(1))
    cluster.kubectl("n1", unschedulable=None)
    cluster.kubectl("n1", unschedulable=True)
    assert made.cordon_status(["n1"])["n1"] == CordonStatus(cordoned_by="kubernetes", reason="cordoned")
    with pytest.raises(Conflict, match="cordoned outside Everstep"):
        made.apply(remediation(2, RemediationKind.UNCORDON))
    with pytest.raises(Conflict, match="cordoned outside Everstep"):
        made.is_done(remediation(2, RemediationKind.UNCORDON))
    node = cluster.nodes["n1"]
    assert node["spec"] == {"unschedulable": True, "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert node["metadata"]["annotations"] == {"site": "a"}


@pytest.mark.parametrize("managers", [None, ["ancient-changes"]])
def test_kubernetes_recognizes_own_cordon_without_field_manager(
    cluster: kube.Cluster, managers: list[str] | None
) -> None:
    made = KubernetesRemediator(cluster.api())
    made.apply(remediation(1))
    node = cluster.nodes["n1"]
    if managers is None:
        del node["metadata"]["managedFields"]
    else:
        node["metadata"]["managedFields"][0]["manager"] = managers[0]
    apply_and_wait(made, remediation(2, RemediationKind.UNCORDON))
    assert not node["spec"]["unschedulable"]


def test_kubernetes_confirms_repair_by_its_annotation(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    apply_and_wait(made, remediation(1, RemediationKind.REPAIR))
    assert not made.is_done(remediation(2, RemediationKind.REPAIR))
    apply_and_wait(made, remediation(2, RemediationKind.REPAIR))


@pytest.mark.promise("kubernetes-events")
def test_kubernetes_evicts_other_pods_despite_disruption_budget(cluster: kube.Cluster) -> None:
    for name in ("a", "b", "c", "d"):
        cluster.add_pod(name, "n1")
    cluster.protected_pods = {"a", "c"}
    made = KubernetesRemediator(cluster.api(), evict=True)
    with pytest.raises(Unavailable, match=r"2 pods of 4 stay on n1.*429"):
        made.apply(remediation(1))
    assert set(cluster.pods) == {"a", "c"}
    assert not made.is_done(remediation(1))
    cluster.protected_pods = set()
    made.apply(remediation(1))
    assert made.is_done(remediation(1))


@pytest.mark.promise("kubernetes-events")
def test_kubernetes_cordons_despite_rejected_event(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    cluster.unchangeable = {"events"}
    with pytest.raises(Unavailable):
        made.apply(remediation(1))
    assert cluster.nodes["n1"]["spec"]["unschedulable"]
    assert not cluster.events
    cluster.unchangeable = set()
    made.apply(remediation(1))
    made.apply(remediation(1))
    assert [event["reason"] for event in cluster.events.values()] == ["EverstepCordon"]


@pytest.mark.promise("kubernetes-events")
def test_kubernetes_posts_event_before_patching_node(cluster: kube.Cluster) -> None:
    made = KubernetesRemediator(cluster.api())
    for number, kind in enumerate(sorted(made.kinds)):
        cluster.calls.clear()
        made.apply(remediation(number, kind))
        (_, _, event), (method, path, _) = cluster.calls
        assert event["metadata"]["name"] == f"everstep.n1-a{number}"
        assert (method, path) == ("PATCH", "/api/v1/nodes/n1"), kind


@pytest.mark.parametrize("evict", [False, True])
def test_kubernetes_roles_match_the_calls_made(cluster: kube.Cluster, evict: bool) -> None:
    from tests.support.services import helm  # skips where Helm's engine is missing

    release = helm.render({"remediation": {"backend": "kubernetes", "evictPods": evict}})
    controller = helm.manifest_named(release, "StatefulSet", "everstep-controller")["spec"]["template"]["spec"]
    account = {"kind": "ServiceAccount", "name": controller["serviceAccountName"], "namespace": helm.NAMESPACE}
    assert controller["automountServiceAccountToken"]
    bindings = helm.of_kind(release, "ClusterRoleBinding", "RoleBinding")
    roles = [binding["roleRef"] for binding in bindings if binding["subjects"] == [account]]
    rules = [rule for role in roles for rule in helm.manifest_named(release, role["kind"], role["name"])["rules"]]
    assert all(rule["apiGroups"] == [""] for rule in rules)
    rights = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert rights == _used(cluster, evict=evict)


def _used(cluster: kube.Cluster, *, evict: bool) -> set[tuple[str, str]]:
    """Rights that everything a remediator can be asked for takes."""
    cluster.used.clear()
    made = KubernetesRemediator(cluster.api(), evict=evict)
    for number, kind in enumerate(sorted(made.kinds)):
        cluster.add_pod("trainer", "n1")
        made.apply(remediation(number, kind))
        made.is_done(remediation(number, kind))
    made.cordon_status(["n1", "n2"])
    cluster.kubectl("n1", unschedulable=None)
    return set(cluster.used)
