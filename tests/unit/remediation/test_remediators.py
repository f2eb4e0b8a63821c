"""What every remediator promises, of a dry run, a webhook, a real Slurm and a Kubernetes API alike."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.core.effects import Remedy, RemedyKind
from controller.remediation.base import MARK, Remediator, Standing
from controller.remediation.dry_run import DryRun
from controller.remediation.kubernetes import Kubernetes
from controller.remediation.slurm import BOOT_JITTER_S, Slurm, parse_node
from controller.remediation.webhook import Webhook
from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from tests.support import kube, slurm
from tests.support.hook import Receiver

SECRET = b"the webhook's own secret"
KINDS = ("dry_run", "webhook", "slurm", "kubernetes")


class Outside:
    """One remediator and the world behind it. ``cordon``: somebody else takes n1 out of service; ``vanish``: the
    world does not answer from now on; ``acts``: how often something was done to a node."""

    def __init__(
        self,
        remediator: Remediator,
        *,
        cordon: Callable[[], object] | None = None,
        vanish: Callable[[], object] | None = None,
        acts: Callable[[], int] | None = None,
    ) -> None:
        self.remediator = remediator
        self.cordon = cordon
        self.vanish = vanish
        self.acts = acts

    def carry_out(self, remedy: Remedy, deadline_s: float = 20.0) -> None:
        """Asks for it and waits until it is read back."""
        self.remediator.apply(remedy)
        end = time.perf_counter() + deadline_s
        while not self.remediator.is_done(remedy):
            assert time.perf_counter() < end, f"{remedy.kind} was not read back"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    if why := slurm.missing():
        pytest.skip(why)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _slurm(cluster: slurm.Cluster) -> Outside:
    cluster.scontrol("update", "NodeName=n1", "State=RESUME")
    cluster.wait_for("IDLE ")
    made = Slurm(configuration=str(cluster.client_configuration()))
    return Outside(
        made,
        cordon=lambda: cluster.scontrol("update", "NodeName=n1", "State=DRAIN", "Reason=a person's own"),
        vanish=cluster.pause,
    )


@pytest.fixture(params=KINDS)
def outside(request: pytest.FixtureRequest) -> Iterator[Outside]:
    if request.param == "slurm":
        cluster = request.getfixturevalue("real_slurm")
        yield _slurm(cluster)
        cluster.resume()
    elif request.param == "kubernetes":
        cluster = kube.Cluster("n1", "n2", "n3")
        made = Kubernetes(cluster.api())
        yield Outside(
            made,
            cordon=lambda: cluster.nodes["n1"]["spec"].update(unschedulable=True),
            vanish=lambda: setattr(cluster, "away", True),
            acts=lambda: sum(1 for method, _, _ in cluster.calls if method == "PATCH"),
        )
        made.close()
        cluster.close()
    elif request.param == "webhook":
        receiver = Receiver(SECRET, nodes=("n1", "n2"))
        yield Outside(
            Webhook(receiver.url, SECRET, wall=lambda: 1.7e9, cordons=True),
            cordon=lambda: receiver.cordoned.update(n1={"cordoned_by": "ada", "reason": "her own"}),
            vanish=lambda: setattr(receiver, "status", 503),
            acts=lambda: len(receiver.done),
        )
        receiver.close()
    else:
        yield Outside(DryRun())


def remedy(number: int, kind: RemedyKind = RemedyKind.CORDON, node: str = "n1") -> Remedy:
    return Remedy(id=f"{node}-a{number}", node=node, kind=kind, sentence="GPU x=1 was not found", at=1.7e9)


# --- the contract ------------------------------------------------------------------------------------------------


def test_a_cordon_is_read_back_and_given_back(outside: Outside) -> None:
    assert not outside.remediator.is_done(remedy(1))
    outside.carry_out(remedy(1))
    outside.carry_out(remedy(2, RemedyKind.UNCORDON))
    assert outside.remediator.standing(["n1"]).get("n1", Standing()) == Standing()


def test_asking_twice_does_it_once(outside: Outside) -> None:
    outside.carry_out(remedy(1))
    before = outside.acts() if outside.acts else 0
    outside.remediator.apply(remedy(1))
    assert outside.remediator.is_done(remedy(1))
    assert (outside.acts() if outside.acts else 0) == before


def test_a_node_handed_to_repair_says_why(outside: Outside) -> None:
    outside.carry_out(remedy(3, RemedyKind.REPAIR))


def test_what_it_cannot_do_is_not_among_its_kinds(outside: Outside) -> None:
    for kind in set(RemedyKind) - outside.remediator.kinds:
        with pytest.raises(Conflict, match="cannot"):
            outside.remediator.apply(remedy(4, kind))


def test_a_node_that_is_not_known_outside_is_given_up(outside: Outside) -> None:
    if isinstance(outside.remediator, DryRun):
        return
    with pytest.raises(Conflict):
        outside.remediator.apply(remedy(1, node="n9"))


def test_somebody_elses_cordon_is_seen_and_never_lifted(outside: Outside) -> None:
    if outside.cordon is None:
        return
    outside.cordon()
    shown = outside.remediator.standing(["n1", "n2"])["n1"]
    assert shown.cordoned_by not in ("", MARK)
    before = outside.acts() if outside.acts else 0
    for kind in (RemedyKind.UNCORDON, RemedyKind.REBOOT, RemedyKind.REPAIR):
        with pytest.raises(Conflict, match="somebody else"):
            outside.remediator.apply(remedy(2, kind))
    assert outside.remediator.standing(["n1"])["n1"] == shown
    assert (outside.acts() if outside.acts else 0) == before


def test_an_outside_that_is_away_will_be_asked_again(outside: Outside) -> None:
    if outside.vanish is None:
        return
    outside.vanish()
    with pytest.raises(Unavailable):
        outside.remediator.apply(remedy(1))
    with pytest.raises(Unavailable):
        outside.remediator.is_done(remedy(1))


# --- what is each one's own --------------------------------------------------------------------------------------


def test_slurm_drains_with_our_reason_and_reboots_once(real_slurm: slurm.Cluster) -> None:
    outside = _slurm(real_slurm)
    outside.carry_out(remedy(1))
    shown = outside.remediator.standing(["n1"])["n1"]
    assert (shown.cordoned_by, shown.reason) == (MARK, "everstep n1-a1: GPU x:1 was not found")
    ahead = SYSTEM_CLOCK.wall() + 1e6  # the controller's clock means nothing to Slurm
    reboot = Remedy(id="n1-a2", node="n1", kind=RemedyKind.REBOOT, sentence="it hangs", at=ahead)
    outside.remediator.apply(reboot)
    outside.remediator.apply(reboot)
    assert not outside.remediator.is_done(reboot)
    _wait(lambda: real_slurm.reboots() == 1)
    _wait(lambda: SYSTEM_CLOCK.wall() > parse_node(real_slurm.shown(TZ="UTC")).booted_at + BOOT_JITTER_S + 1)
    real_slurm.boot()
    _wait(lambda: outside.remediator.is_done(reboot))
    outside.remediator.apply(reboot)
    outside.carry_out(remedy(3, RemedyKind.UNCORDON))
    assert real_slurm.reboots() == 1


def _wait(happens: Callable[[], Any], deadline_s: float = 30.0) -> None:
    end = time.perf_counter() + deadline_s
    while not happens():
        assert time.perf_counter() < end
        time.sleep(0.05)


def test_slurms_words_for_a_node_are_understood() -> None:
    line = "NodeName=n1 State=IDLE+DRAIN+REBOOT_REQUESTED BootTime=None Reason=a person: why not? [root@2026-11-20]"
    node = parse_node(line)
    assert (node.is_out, node.is_ours, node.reason, node.booted_at) == (True, False, "a person: why not?", 0.0)
    assert not parse_node("NodeName=n1 State=IDLE*").is_out
    assert parse_node("NodeName=n1 State=MIXED+MAINT").is_out


def test_slurm_that_is_not_installed_or_away_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not on this machine"):
        Slurm("no-such-scontrol")
    if why := slurm.missing():
        pytest.skip(why)
    away = tmp_path / "slurm.conf"
    away.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/munge\nMessageTimeout=2\nTCPTimeout=1\n"
    )
    with pytest.raises(Unavailable):  # no munge either, or nobody at that port
        Slurm(configuration=str(away)).is_done(remedy(1))


class Scripted:
    """A ``scontrol`` that says what it is told to, and keeps what it was asked."""

    def __init__(self, directory: Path) -> None:
        self._says, self._asked = directory / "says", directory / "asked"
        program = directory / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self._asked}\n. {self._says}\n')
        program.chmod(0o700)
        self.slurm = Slurm(str(program))

    def fails(self, words: str) -> None:
        self._says.write_text(f"echo {shlex.quote(words)} >&2; exit 1\n")

    def shows(self, state: str, booted: str, reason: str = "") -> None:
        line = f"NodeName=n1 State={state} BootTime={booted} Reason={reason} [root@{booted}]"
        self._says.write_text(f"echo {shlex.quote(line)}\n")

    def orders(self) -> list[str]:
        """What changed something."""
        return [line for line in self._asked.read_text().splitlines() if "show node" not in line]


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_node error: Unable to contact slurm controller (connect failure)",
        "slurm_load_node error: Zero Bytes were transmitted or received",
        "slurm_update error: Slurm backup controller in standby mode",
        'error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"\nslurm_load_node error: Protocol '
        "authentication error",
        "slurm_load_node error: Socket timed out on send/recv operation",
        "words of a release to come",
    ],
)
def test_slurm_is_asked_again_unless_it_refuses(tmp_path: Path, words: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(words)
    with pytest.raises(Unavailable):
        scripted.slurm.apply(remedy(1))


@pytest.mark.parametrize(
    "words",
    [
        "Node n1 not found",
        "slurm_update error: Invalid node name specified",
        "slurm_update error: Invalid user id",
        "scontrol_reboot_nodes error: Permission denied",
        "scontrol: error: RebootProgram isn't defined\nscontrol_reboot_nodes error: Unspecified error",
    ],
)
def test_what_slurm_refuses_is_given_up(tmp_path: Path, words: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(words)
    with pytest.raises(Conflict, match="refused"):
        scripted.slurm.apply(remedy(1))


def test_a_reboot_is_read_back_by_slurms_own_clock(tmp_path: Path) -> None:
    scripted, reboot = Scripted(tmp_path), remedy(7, RemedyKind.REBOOT)
    scripted.shows("IDLE", "2031-01-01T00:00:00")  # later than the remedy: that node's clock is ahead
    assert not scripted.slurm.is_done(reboot)
    scripted.slurm.apply(reboot)
    (order,) = scripted.orders()
    assert order.startswith("reboot ASAP nextstate=DOWN reason=everstep n1-a7 after boot of 2031-01-01T00:00:00: ")
    reason = order.partition("reason=")[2].removesuffix(" n1")
    for state, booted, done in (
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T00:00:00", False),
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T01:00:00", False),
        ("DOWN", "2031-01-01T00:00:02", False),  # the same boot, dated anew
        ("DOWN", "2031-01-01T00:01:00", True),
    ):
        scripted.shows(state, booted, f"{reason} : reboot issued")
        assert scripted.slurm.is_done(reboot) is done, (state, booted)
    scripted.shows("DOWN", "2031-01-01T00:01:00", reason.replace("n1-a7", "n1-a6"))
    assert not scripted.slurm.is_done(reboot)


def test_a_reboot_that_a_person_called_off_is_not_asked_for_again_and_a_persons_own_is_waited_for(
    tmp_path: Path,
) -> None:
    scripted, reboot = Scripted(tmp_path), remedy(7, RemedyKind.REBOOT)
    booted = "2026-01-01T00:00:00"
    scripted.shows("IDLE", booted, f"everstep n1-a7 after boot of {booted}: it hangs")
    scripted.slurm.apply(reboot)
    scripted.shows("IDLE+REBOOT_REQUESTED", booted, "a new kernel")
    with pytest.raises(Unavailable, match="a new kernel"):
        scripted.slurm.apply(reboot)
    assert scripted.orders() == []


def test_kubernetes_keeps_others_taints_and_notes_and_tells_an_event_once() -> None:
    cluster = kube.Cluster("n1")
    made = Kubernetes(cluster.api())
    try:
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
    finally:
        made.close()
        cluster.close()


def test_kubernetes_empties_a_cordoned_node_but_for_daemons_where_asked() -> None:
    cluster = kube.Cluster("n1", "n2")
    cluster.add_pod("trainer", "n1")
    cluster.add_pod("agent", "n1", owner="DaemonSet")
    cluster.add_pod("other", "n2")
    made = Kubernetes(cluster.api(), evict=True)
    try:
        made.apply(remedy(1))
        assert made.is_done(remedy(1))
        assert set(cluster.pods) == {"agent", "other"}
    finally:
        made.close()
        cluster.close()


def test_kubernetes_takes_a_new_boot_id_for_a_reboot() -> None:
    cluster = kube.Cluster("n1")
    made = Kubernetes(cluster.api())
    try:
        made.apply(remedy(1, RemedyKind.REBOOT))
        made.apply(remedy(1, RemedyKind.REBOOT))
        assert sum(1 for method, _, _ in cluster.calls if method == "PATCH") == 1
        assert not made.is_done(remedy(1, RemedyKind.REBOOT))
        cluster.boot("n1", "boot-2")
        assert made.is_done(remedy(1, RemedyKind.REBOOT))
    finally:
        made.close()
        cluster.close()
