"""A fleet that writes every event to a journal, and a history with every kind of event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from everstep.ids import Version
from everstep.vocabulary import Action, Severity
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import RankProgress
from everstep.wire.v1.vault_reports import VersionProtected, VersionSpilled
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import (
    DatabaseAvailabilityChanged,
    Event,
    HeartbeatChanged,
    OperatorAction,
    ProbeRequested,
    RemediationFinished,
    SchedulerStateChanged,
)
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.recorder import Journal
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid


class JournaledFleet(CoreFleet):
    """A fleet with a journal of every event in ``directory``."""

    def __init__(self, directory: Path, policy: CorePolicy | None = None, **sizes: int) -> None:
        options = {"max_bytes": 1 << 30, "keep_s": 86400.0, **sizes}
        self.journal = Journal(directory, **options)  # type: ignore[arg-type]
        super().__init__(policy)

    def feed(self, event: Event) -> list[Effect]:
        effects = self.journal.decide(self.state, event, self.now)
        self.effects += effects
        return effects


def feed_every_event(fleet: CoreFleet) -> None:
    """Feed every kind of event and of report, with all fields set in one of each kind."""
    _start_fleet(fleet)
    _lose_nodes_and_ranks(fleet)
    _give_operator_commands(fleet)
    _report_from_vaults(fleet)
    fleet.audited(7)
    fleet.audit(0, 9, "bad", "good", "good", "good", difference="3 of 9 elements differ")
    fleet.resume()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="it does not answer", trace=fleet.trace()))
    fleet.lose_rank(0)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False, unsent_jobs=("job",), trace=fleet.trace()))
    fleet.resume()
    fleet.raise_user_error(0)
    fleet.resume()
    fleet.finish()


def _start_fleet(fleet: CoreFleet) -> None:
    fleet.start(4, 3, max_user_retries=2)
    fleet.register("m1", "m2", domain=Domain(rack="r1", switch="s1"), labels={"pool": "train"})
    fleet.seal(5, copied=True)
    mild = msgspec.structs.replace(xid(31, Action.NONE), severity=Severity.WARNING, message="XID 31")
    fleet.beat("m1", mild)
    fleet.clear_finding("m1", mild.key)
    progress = RankProgress(job="job", generation=1, rank=0, step=9, step_s=0.05, loss=2.5)
    fleet.feed(HeartbeatChanged(node="n1", incarnation=1, findings=(), ranks=(progress,), trace=fleet.trace()))


def _lose_nodes_and_ranks(fleet: CoreFleet) -> None:
    fleet.raise_finding("n2", xid())
    for effect in list(fleet.effects):
        if type(effect).__name__ == "RequestRemediation":
            request: Any = effect
            done = RemediationFinished(
                remediation_id=request.remediation.id, node=request.remediation.node, succeeded=True, detail="as asked"
            )
            fleet.feed(done)
    fleet.resume()
    fleet.advance(8.0, "n1", "n3", "n4", "n5", "n6", "n7", "m1")
    fleet.disconnect("n7")
    fleet.mark_seen("n7")
    fleet.stop_controller(1.0)
    fleet.fail_collective(0)
    fleet.lose_peer(fleet.spec().roster[0].node, fleet.spec().roster[1].node)
    fleet.stall(1)
    fleet.unresponsive(1)
    fleet.lose_rank(1)
    fleet.resume()


def _give_operator_commands(fleet: CoreFleet) -> None:
    fleet.order(OperatorAction.HOLD, node="m1")
    fleet.order(OperatorAction.READMIT, node="m1")
    fleet.order(OperatorAction.MAINTENANCE, rack="r1", until=fleet.now + 3600.0)
    fleet.order(OperatorAction.RESIZE_JOB, job="job", node_limit=3)
    fleet.feed(SchedulerStateChanged(node="n6", cordoned_by="kim", reason="a cable", trace=fleet.trace()))
    fleet.feed(SchedulerStateChanged(node="n6", trace=fleet.trace()))
    probe = ProbeRequested(nodes=("n5", "n6"), actor="ada", reason="a new cable", trace=fleet.trace())
    fleet.feed(probe)
    for node in probe.nodes:
        fleet.probe_result(node)


def _report_from_vaults(fleet: CoreFleet) -> None:
    node, version = fleet.spec().roster[0].node, Version(fleet.spec().number, 7)
    fleet.seal(7)
    spilled = VersionSpilled(
        job="job",
        at=fleet.now,
        version=version,
        attempt=1,
        url="file:///ckpt",
        bytes=100,
        complete=True,
        removed=("x",),
    )
    fleet.report(node, spilled)
    fleet.report(node, VersionProtected(job="job", at=fleet.now, version=version, members_digests={0: "p0"}))
    fleet.announce_leaving(fleet.spec().roster[-1].node)
    fleet.leave(fleet.spec().roster[-1].node, orderly=True)
    fleet.resume()
