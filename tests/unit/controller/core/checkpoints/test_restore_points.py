"""The restore points of a job by storage tier, in the order in which the job would use them."""

from __future__ import annotations

from typing import Any

from everstep.ids import Version
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from everstep.wire.v1.training import SpillPlan
from everstep.wire.v1.vault_reports import VersionProtected, VersionSpilled
from everstep_controller.core.checkpoints.restore_points import list_checkpoints
from tests.support.fleet.core_fleet import CoreFleet, sent

SIX = tuple(f"n{at + 1}" for at in range(6))


def _fleet(**spec: Any) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(6, **({"min_nodes": 4, "replicas": 1} | spec))
    return fleet


def _commit(fleet: CoreFleet, step: int) -> tuple[dict[str, ProtectVersion], dict[str, SpillVersion]]:
    fleet.progress(step)
    fleet.state.job_runtime["job"].commits.candidate_step = step
    effects = fleet.seal(step)
    return sent(effects, ProtectVersion), sent(effects, SpillVersion)


def _places(fleet: CoreFleet) -> list[tuple[str, str, str, bool]]:
    listed = list_checkpoints(fleet.state, fleet.job())
    return [
        (str(version.version), version.storage_tier, version.state, version.restorable) for version in listed.versions
    ]


def test_no_restore_point_exists_before_first_commit() -> None:
    fleet = _fleet()
    listed = list_checkpoints(fleet.state, fleet.job())
    assert listed.versions == ()
    assert listed.sentence == "no checkpoint of job job can be restored"


def test_restore_points_order_memory_parity_storage() -> None:
    fleet = _fleet(parity_group_size=4, spill=SpillPlan(every_steps=10, url="/s"))
    protects, spills = _commit(fleet, 10)
    assert _places(fleet) == [
        ("1:10", "memory", "complete", True),
        ("1:10", "parity", "in_progress", False),
        ("1:10", "storage", "in_progress", False),
    ]
    for node, order in protects.items():
        made = {group.group: "m" for group in order.groups}
        fleet.report(node, VersionProtected(job="job", at=fleet.now, version=order.version, members_digests=made))
    for node, spill in spills.items():
        report = VersionSpilled(
            job="job", at=fleet.now, version=spill.version, attempt=0, url="/s/job/a", complete=node == "n6"
        )
        fleet.report(node, report)
    assert _places(fleet) == [
        ("1:10", "memory", "complete", True),
        ("1:10", "parity", "complete", True),
        ("1:10", "storage", "complete", True),
    ]
    listed = list_checkpoints(fleet.state, fleet.job())
    assert listed.sentence.startswith("after a loss now, job job goes back to 1:10 or a newer one: it is committed")


def test_restore_points_fall_back_to_parity_then_storage() -> None:
    fleet = _fleet(parity_group_size=4, spill=SpillPlan(every_steps=10, url="/s"))
    protects, spills = _commit(fleet, 10)
    for node, order in protects.items():
        made = {group.group: "m" for group in order.groups}
        fleet.report(node, VersionProtected(job="job", at=fleet.now, version=order.version, members_digests=made))
    for node, spill in spills.items():
        report = VersionSpilled(
            job="job", at=fleet.now, version=spill.version, attempt=0, url="/s/job/a", complete=node == "n6"
        )
        fleet.report(node, report)
    fleet.disconnect("n1")
    fleet.disconnect("n2")
    fleet.advance(30, *SIX[2:])
    assert _places(fleet)[:2] == [("1:10", "memory", "complete", False), ("1:10", "parity", "complete", True)]
    fleet.disconnect("n3")
    fleet.advance(30, *SIX[3:])
    assert [restorable for *_, restorable in _places(fleet)] == [False, False, True]
    assert "1:10" in list_checkpoints(fleet.state, fleet.job()).sentence


def test_restore_points_report_spill_failures() -> None:
    fleet = _fleet(spill=SpillPlan(every_steps=10, url="/s"))
    _, spills = _commit(fleet, 10)
    report = VersionSpilled(
        job="job", at=fleet.now, version=Version(1, 10), attempt=0, code="not_found", message="overwritten"
    )
    fleet.report(next(iter(spills)), report)
    listed = list_checkpoints(fleet.state, fleet.job())
    assert listed.spills_failed == 1
    assert "overwritten" in listed.last_error
