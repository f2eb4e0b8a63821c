"""The clock of a controller's next life may be ahead of its records, or behind them."""

from __future__ import annotations

import pytest

from everstep.vocabulary import Action, Finding, FindingKind, NodeState, Severity
from tests.support.core_fleet import CoreFleet, audits

SICK = Finding(
    kind=FindingKind.GPU_RECOVERY_ACTION,
    subject="0",
    severity=Severity.CRITICAL,
    message="a reset is required",
    action=Action.RESET_GPU,
)


def _fleet() -> CoreFleet:
    """Of four nodes n2 is in quarantine and well again, n3 has lost its launcher, and the job has two of three."""
    fleet = CoreFleet()
    fleet.start(3, 1, min_nodes=2)
    fleet.raise_finding("n2", SICK)
    fleet.clear_finding("n2", SICK.key)
    fleet.resume(step=40)
    fleet.leave("n3")
    fleet.resume(step=60)
    return fleet


@pytest.mark.parametrize("jump_s", [0.0, -1.0, -7200.0, 7200.0])
def test_quarantine_ends_and_a_job_grows_whatever_the_clock_of_the_next_life_says(jump_s: float) -> None:
    fleet = _fleet()
    fleet.now += jump_s
    fleet.restart()
    fleet.advance(4, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.PROBATION
    fleet.join("n1", "n4", again=True, generation=3)
    fleet.progress(80)
    fleet.join("n3")
    fleet.advance(2, *fleet.state.nodes)
    assert set(fleet.seats()) == {"n1", "n3", "n4"}


def test_a_clock_that_was_set_back_is_said_once_and_counts_nothing_twice() -> None:
    fleet = _fleet()
    fleet.now -= 3600.0
    said = audits(fleet.restart(), "controller.clock_behind")
    assert said == ["this controller's clock is 3600 s behind its records: times of the future there count as now"]
    assert not audits(fleet.restart(), "controller.clock_behind")
    assert [eviction.at for eviction in fleet.state.fleet.evicted] == [fleet.now]


def test_the_end_of_a_maintenance_window_stays_where_the_operator_put_it() -> None:
    fleet = _fleet()
    until = fleet.now + 60.0
    fleet.state.nodes["n1"].maintenance_until = until
    fleet.now -= 3600.0
    fleet.restart()
    assert fleet.state.nodes["n1"].maintenance_until == until
