"""The contract of every remediator: dry run, webhook, a real Slurm, and a Kubernetes API."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from everstep.errors import Conflict
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.kubernetes import REPAIR, KubernetesRemediator
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus, DryRunRemediator, Remediator
from everstep_controller.remediation.slurm import SlurmRemediator, parse_node
from everstep_controller.remediation.webhook import WebhookRemediator
from tests.support.fleet.remediations import apply_and_wait, remediation
from tests.support.services import kube, slurm
from tests.support.services.webhook_receiver import WebhookReceiver

SECRET = b"the webhook's own secret"
DEADLINE_S = 60.0
each_kind = pytest.mark.parametrize("kind", RemediationKind)


class Outside:
    """A remediator and the system that it acts on.

    ``acts``: how often a node was acted on. ``why``: the reason that the system shows for a node in repair.
    ``boots``: the node boots after a requested reboot. ``knows_nodes``: whether the system tells nodes apart, names the
    owner of a cordon, and shows its own outage; ``cordon``: an operator takes n1 out of service;
    ``vanish``: the system stops answering.
    """

    knows_nodes = True

    def __init__(self, remediator: Remediator) -> None:
        self.remediator = remediator

    def acts(self) -> int:
        raise NotImplementedError

    def why(self) -> str:
        raise NotImplementedError

    def boots(self) -> None:
        pass

    def cordon(self) -> None:
        raise NotImplementedError

    def vanish(self) -> None:
        raise NotImplementedError

    def apply_and_wait(self, remediation: Remediation) -> None:
        apply_and_wait(self.remediator, remediation)

    def uncordon(self) -> None:
        """An operator returns n1 to service, whichever owner cordoned it."""
        pytest.skip(f"{self.remediator.name} does not show the nodes in service")

    def is_to_offer(self, kind: RemediationKind) -> None:
        if kind not in self.remediator.kinds:
            pytest.skip(f"{self.remediator.name} offers no {kind}")

    def is_to_know_nodes(self) -> None:
        if not self.knows_nodes:
            pytest.skip(f"{self.remediator.name} does not tell nodes apart")


class InTheLog(Outside):
    knows_nodes = False

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(DryRunRemediator())
        self._caplog = caplog

    def _lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name.endswith("remediator")]

    def acts(self) -> int:
        return len(self._lines())

    def why(self) -> str:
        return self._lines()[-1]


class AtAReceiver(Outside):
    def __init__(self, receiver: WebhookReceiver) -> None:
        super().__init__(WebhookRemediator(receiver.url, SECRET, wall=lambda: 1.7e9, cordons=True))
        self._receiver = receiver

    def acts(self) -> int:
        return len(self._receiver.done)

    def why(self) -> str:
        return list(self._receiver.done.values())[-1]["sentence"]

    def cordon(self) -> None:
        self._receiver.cordoned["n1"] = {"cordoned_by": "ada", "reason": "her own"}

    def vanish(self) -> None:
        self._receiver.status = 503


class InSlurm(Outside):
    """`directory` holds a `scontrol` that records its arguments and calls the real one."""

    def __init__(self, cluster: slurm.Cluster, directory: Path) -> None:
        self._asked = directory / "asked"
        self._asked.touch()
        program = directory / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self._asked}\nexec scontrol "$@"\n')
        program.chmod(0o700)
        super().__init__(SlurmRemediator(str(program), configuration=str(cluster.client_configuration())))
        self._cluster, self._rebooted = cluster, cluster.reboots()

    def acts(self) -> int:
        return sum(1 for line in self._asked.read_text().splitlines() if "show node" not in line)

    def why(self) -> str:
        return parse_node(self._cluster.shown()).reason

    def boots(self) -> None:
        self._cluster.boot_when_requested(self._rebooted)

    def cordon(self) -> None:
        self._cluster.scontrol("update", "NodeName=n1", "State=DRAIN", "Reason=a person's own")

    def uncordon(self) -> None:
        self._cluster.scontrol("update", "NodeName=n1", "State=RESUME")

    def vanish(self) -> None:
        self._cluster.pause()


class InKubernetes(Outside):
    def __init__(self, cluster: kube.Cluster) -> None:
        super().__init__(KubernetesRemediator(cluster.api()))
        self._cluster = cluster

    def acts(self) -> int:
        return sum(1 for method, _, _ in self._cluster.calls if method == "PATCH")

    def why(self) -> str:
        return str(self._cluster.nodes["n1"]["metadata"]["annotations"][REPAIR])

    def boots(self) -> None:
        self._cluster.boot("n1", "boot-2")

    def cordon(self) -> None:
        self._cluster.kubectl("n1", unschedulable=True)

    def uncordon(self) -> None:
        self._cluster.kubectl("n1", unschedulable=False)

    def vanish(self) -> None:
        self._cluster.is_unavailable = True


@contextmanager
def _in_the_log(request: pytest.FixtureRequest) -> Iterator[Outside]:
    caplog = request.getfixturevalue("caplog")
    with caplog.at_level(logging.INFO, logger="everstep_controller.remediation.remediator"):
        yield InTheLog(caplog)


@contextmanager
def _at_a_receiver(_: pytest.FixtureRequest) -> Iterator[Outside]:
    receiver = WebhookReceiver(SECRET, nodes=("n1", "n2"))
    try:
        yield AtAReceiver(receiver)
    finally:
        receiver.close()


@contextmanager
def _in_slurm(request: pytest.FixtureRequest) -> Iterator[Outside]:
    cluster = request.getfixturevalue("real_slurm")
    cluster.make_idle()
    try:
        yield InSlurm(cluster, request.getfixturevalue("tmp_path"))
    finally:
        cluster.resume()


@contextmanager
def _in_kubernetes(_: pytest.FixtureRequest) -> Iterator[Outside]:
    cluster = kube.Cluster("n1", "n2", "n3")
    try:
        yield InKubernetes(cluster)
    finally:
        cluster.close()


WORLDS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[Outside]]] = {
    "dry_run": _in_the_log,
    "webhook": _at_a_receiver,
    "slurm": _in_slurm,
    "kubernetes": _in_kubernetes,
}


@pytest.fixture(params=WORLDS)
def outside(request: pytest.FixtureRequest) -> Iterator[Outside]:
    with WORLDS[request.param](request) as made:
        yield made


def _wait(happens: Callable[[], object]) -> None:
    end = time.perf_counter() + DEADLINE_S
    while not happens():
        assert time.perf_counter() < end
        time.sleep(0.02)


def test_remediator_cordons_and_uncordons(outside: Outside) -> None:
    assert not outside.remediator.is_done(remediation(1))
    outside.apply_and_wait(remediation(1))
    outside.apply_and_wait(remediation(2, RemediationKind.UNCORDON))
    assert outside.remediator.cordon_status(["n1"]).get("n1", CordonStatus()) == CordonStatus()


@pytest.mark.promise("remediation-once")
@each_kind
def test_remediator_repeated_request_acts_once(outside: Outside, kind: RemediationKind) -> None:
    outside.is_to_offer(kind)
    if kind is RemediationKind.UNCORDON:
        outside.apply_and_wait(remediation(1))
    wanted, before = remediation(2, kind), outside.acts()
    for _ in range(3):
        outside.remediator.apply(wanted)
    assert outside.acts() == before + 1
    if kind is RemediationKind.REBOOT:
        outside.boots()
    _wait(lambda: outside.remediator.is_done(wanted))
    outside.remediator.apply(wanted)
    assert outside.remediator.is_done(wanted)
    assert outside.acts() == before + 1


def test_remediator_repair_shows_reason(outside: Outside) -> None:
    wanted = remediation(3, RemediationKind.REPAIR)
    assert not outside.remediator.is_done(wanted)
    outside.apply_and_wait(wanted)
    assert wanted.sentence.partition("=")[2] in outside.why()


def test_remediator_refuses_unsupported_kinds(outside: Outside) -> None:
    refused = set(RemediationKind) - outside.remediator.kinds
    if not refused:
        pytest.skip(f"{outside.remediator.name} can do everything")
    for kind in refused:
        with pytest.raises(Conflict, match="cannot"):
            outside.remediator.apply(remediation(4, kind))
    assert outside.acts() == 0


@each_kind
def test_remediator_refuses_unknown_node(outside: Outside, kind: RemediationKind) -> None:
    outside.is_to_know_nodes()
    outside.is_to_offer(kind)
    with pytest.raises(Conflict):
        outside.remediator.apply(remediation(1, kind, node="n9"))


@pytest.mark.promise("holds-respected")
def test_remediator_never_lifts_foreign_cordon(outside: Outside) -> None:
    outside.is_to_know_nodes()
    outside.cordon()
    shown = outside.remediator.cordon_status(["n1", "n2"])["n1"]
    assert shown.cordoned_by not in ("", CORDON_OWNER)
    before = outside.acts()
    for kind in (RemediationKind.UNCORDON, RemediationKind.REBOOT, RemediationKind.REPAIR):
        with pytest.raises(Conflict, match="cordoned outside Everstep"):
            outside.remediator.apply(remediation(2, kind))
    assert outside.remediator.cordon_status(["n1"])["n1"] == shown
    assert outside.acts() == before


def test_remediator_shows_own_cordon_until_lifted(outside: Outside) -> None:
    outside.is_to_know_nodes()
    outside.remediator.apply(remediation(1))
    taken = outside.remediator.cordon_status(["n1"])
    outside.uncordon()
    assert taken["n1"].cordoned_by == CORDON_OWNER
    assert outside.remediator.cordon_status(["n1"]) == {"n1": CordonStatus()}
