"""Totals of a run: its seconds by activity, and its committed bytes."""

from __future__ import annotations

from everstep.ids import Version
from everstep_controller.core.records import VersionRecord
from everstep_controller.read_models.run_totals import RunActivity, RunTotals
from tests.support.fleet.core_fleet import CoreFleet


def test_seconds_follow_a_run_through_a_rank_loss() -> None:
    fleet, totals = CoreFleet(), RunTotals()
    fleet.register("n1", "n2")
    fleet.join("n1", "n2", min_nodes=2, max_nodes=2)
    start = fleet.now
    totals.record_state(fleet.job(), start)
    fleet.resume()
    totals.record_state(fleet.job(), start + 5.0)
    fleet.lose_rank(0)
    totals.record_state(fleet.job(), start + 25.0)
    fleet.resume()
    totals.record_state(fleet.job(), start + 28.0)
    totals.record_state(fleet.job(), start + 30.0)
    assert totals.seconds("job") == {
        RunActivity.FORMING: 5.0,
        RunActivity.TRAINING: 22.0,
        RunActivity.RECOVERING: 3.0,
        RunActivity.PAUSED: 0.0,
    }


def test_committed_bytes_count_before_the_first_state() -> None:
    fleet, totals = CoreFleet(), RunTotals()
    fleet.start(2)
    for step in (1, 2):
        totals.record_version(VersionRecord(job="job", version=Version(1, step), committed_at=1.0, bytes=100))
    totals.record_state(fleet.job(), 1.0)
    assert totals.committed_bytes("job") == 200
    totals.forget("job")
    totals.record_state(fleet.job(), 2.0)
    assert totals.committed_bytes("job") == 0
