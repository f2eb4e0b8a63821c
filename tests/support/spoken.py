"""A small fleet that speaks to a controller in the test's own process."""

from __future__ import annotations

from starlette.testclient import TestClient

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1.training import Resumed
from tests.support.controllers import Speaker, joined

FELL_OFF = Finding(
    kind=FindingKind.GPU_XID,
    subject="gpu0",
    severity=Severity.CRITICAL,
    message="XID 79: GPU has fallen off the bus",
    action=Action.REPAIR,
    rule="xid-79",
    source="NVIDIA XID catalogue",
    xid=79,
    trace="bus-79",
)


def fleet(client: TestClient, *nodes: str) -> list[Speaker]:
    speakers = [Speaker(client, node) for node in nodes]
    for speaker in speakers:
        speaker.register()
        speaker.beat(findings=())
    return speakers


def running_job(client: TestClient, *nodes: str, spare: str = "") -> list[Speaker]:
    """A job ``j`` over ``nodes``, in generation 1, its ranks stepping."""
    speakers = fleet(client, *nodes, *filter(None, [spare]))
    for speaker in speakers:
        speaker.report(joined("j", 1.0, nodes=len(nodes)))
    resume(speakers[: len(nodes)], 1)
    return speakers


def resume(speakers: list[Speaker], generation: int) -> None:
    for rank, speaker in enumerate(speakers):
        phases = {"rendezvous": 0.01 * (rank + 1), "restore": 0.02}
        speaker.report(
            Resumed(job="j", at=1.0, generation=generation, rank=rank, step=1, restored=None, phases_s=phases)
        )
