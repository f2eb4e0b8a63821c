"""What every remediator promises, of a dry run, a webhook, a real Slurm and a Kubernetes API alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from controller.core.effects import Remedy, RemedyKind
from controller.remediation.base import MARK, Remediator, Standing
from controller.remediation.dry_run import DryRun
from controller.remediation.kubernetes import Kubernetes
from controller.remediation.slurm import Slurm
from controller.remediation.webhook import Webhook
from everstep.errors import Conflict, Unavailable
from tests.support import kube
from tests.support.hook import Receiver
from tests.support.remedies import carry_out, remedy

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

    def carry_out(self, remedy: Remedy) -> None:
        carry_out(self.remediator, remedy)


@pytest.fixture(params=KINDS)
def outside(request: pytest.FixtureRequest) -> Iterator[Outside]:
    if request.param == "slurm":
        real = request.getfixturevalue("real_slurm")
        real.make_idle()
        yield Outside(
            Slurm(configuration=str(real.client_configuration())),
            cordon=lambda: real.scontrol("update", "NodeName=n1", "State=DRAIN", "Reason=a person's own"),
            vanish=real.pause,
        )
        real.resume()
    elif request.param == "kubernetes":
        cluster = kube.Cluster("n1", "n2", "n3")
        made = Kubernetes(cluster.api())
        yield Outside(
            made,
            cordon=lambda: cluster.kubectl("n1", unschedulable=True),
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
