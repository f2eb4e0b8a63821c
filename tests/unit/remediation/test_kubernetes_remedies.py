"""Kubernetes: whose a cordon is, what is kept of others, what is evicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controller.core.effects import RemedyKind
from controller.remediation.base import Standing
from controller.remediation.kubernetes import Kubernetes
from everstep.errors import Conflict, Unavailable
from tests.support import kube
from tests.support.remedies import carry_out, remedy


@pytest.fixture
def cluster() -> Iterator[kube.Cluster]:
    made = kube.Cluster("n1", "n2")
    yield made
    made.close()


def test_kubernetes_keeps_others_taints_and_notes_and_tells_an_event_once(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    made.apply(remedy(1))
    made.apply(remedy(1))
    node = cluster.nodes["n1"]
    assert node["spec"]["unschedulable"]
    assert [taint["key"] for taint in node["spec"]["taints"]] == ["nvidia.com/gpu", "everstep.dev/quarantined"]
    assert node["metadata"]["annotations"]["site"] == "a"
    assert [event["reason"] for event in cluster.events.values()] == ["EverstepCordon"]
    made.apply(remedy(2, RemedyKind.UNCORDON))
    assert node["spec"] == {"unschedulable": False, "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert node["metadata"]["annotations"] == {"site": "a"}


def test_kubernetes_empties_a_cordoned_node_but_for_daemons_and_static_pods_where_asked(cluster: kube.Cluster) -> None:
    cluster.add_pod("trainer", "n1")
    cluster.add_pod("agent", "n1", owner="DaemonSet")
    cluster.add_pod("static", "n1", owner="Node", **{"kubernetes.io/config.mirror": "a hash"})
    cluster.add_pod("other", "n2")
    made = Kubernetes(cluster.api(), evict=True)
    made.apply(remedy(1))
    assert made.is_done(remedy(1))
    assert set(cluster.pods) == {"agent", "static", "other"}


def test_kubernetes_takes_a_new_boot_id_for_a_reboot(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    made.apply(remedy(1, RemedyKind.REBOOT))
    made.apply(remedy(1, RemedyKind.REBOOT))
    assert sum(1 for method, _, _ in cluster.calls if method == "PATCH") == 1
    assert not made.is_done(remedy(1, RemedyKind.REBOOT))
    cluster.boot("n1", "boot-2")
    assert made.is_done(remedy(1, RemedyKind.REBOOT))


def test_what_a_person_has_lifted_is_lifted_and_can_be_cordoned_again(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    made.apply(remedy(1))
    cluster.kubectl("n1", unschedulable=None)
    assert made.standing(["n1"])["n1"] == Standing()
    carry_out(made, remedy(2))
    assert made.standing(["n1"])["n1"].reason.startswith("everstep n1-a2:")
    cluster.kubectl("n1", unschedulable=None)
    carry_out(made, remedy(3, RemedyKind.REPAIR))
    assert made.standing(["n1"])["n1"].reason.startswith("everstep n1-a3:")
    cluster.kubectl("n1", unschedulable=None)
    carry_out(made, remedy(4, RemedyKind.UNCORDON))
    assert cluster.nodes["n1"]["metadata"]["annotations"] == {"site": "a"}


def test_a_persons_own_cordon_after_ours_was_lifted_is_theirs(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    made.apply(remedy(1))
    cluster.kubectl("n1", unschedulable=None)
    cluster.kubectl("n1", unschedulable=True)
    assert made.standing(["n1"])["n1"] == Standing(cordoned_by="kubernetes", reason="cordoned")
    with pytest.raises(Conflict, match="somebody else"):
        made.apply(remedy(2, RemedyKind.UNCORDON))
    with pytest.raises(Conflict, match="somebody else"):
        made.is_done(remedy(2, RemedyKind.UNCORDON))
    node = cluster.nodes["n1"]
    assert node["spec"] == {"unschedulable": True, "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
    assert node["metadata"]["annotations"] == {"site": "a"}


@pytest.mark.parametrize("managers", [None, ["ancient-changes"]])
def test_our_cordon_is_ours_where_the_server_no_longer_says_who_set_it(
    cluster: kube.Cluster, managers: list[str] | None
) -> None:
    made = Kubernetes(cluster.api())
    made.apply(remedy(1))
    node = cluster.nodes["n1"]
    if managers is None:
        del node["metadata"]["managedFields"]
    else:
        node["metadata"]["managedFields"][0]["manager"] = managers[0]
    carry_out(made, remedy(2, RemedyKind.UNCORDON))
    assert not node["spec"]["unschedulable"]


def test_a_taint_that_somebody_adds_meanwhile_is_not_lost(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    for number, kind in enumerate((RemedyKind.CORDON, RemedyKind.UNCORDON)):
        cluster.meanwhile = lambda kind=kind: cluster.taint("n1", f"site/{kind}")
        with pytest.raises(Unavailable, match="409"):
            made.apply(remedy(number, kind))
        carry_out(made, remedy(number, kind))
    keys = [taint["key"] for taint in cluster.nodes["n1"]["spec"]["taints"]]
    assert keys == ["nvidia.com/gpu", "site/cordon", "site/uncordon"]


def test_a_repair_is_told_by_its_own_note(cluster: kube.Cluster) -> None:
    made = Kubernetes(cluster.api())
    carry_out(made, remedy(1, RemedyKind.REPAIR))
    assert not made.is_done(remedy(2, RemedyKind.REPAIR))
    carry_out(made, remedy(2, RemedyKind.REPAIR))
