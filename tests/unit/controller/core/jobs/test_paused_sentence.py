"""What a paused job says that it waits for, while that changes."""

from __future__ import annotations

from everstep_controller.core.effects import PutJob

from everstep.vocabulary import JobState
from tests.support.core_fleet import CoreFleet

NODES = ["n1", "n2", "n3", "n4"]


def _paused() -> CoreFleet:
    """A job of four nodes that needs them all, and has lost one."""
    fleet = CoreFleet()
    fleet.start(4, min_nodes=4)
    fleet.leave("n4")
    assert fleet.job_state() is JobState.PAUSED
    return fleet


def test_paused_job_reports_a_returned_node() -> None:
    fleet = _paused()
    fleet.leave("n3")
    fleet.leave("n2")
    fleet.advance(1.1, *NODES)
    assert "able to go on: n1; " in fleet.job().status.sentence
    fleet.join("n2", again=True, min_nodes=4, max_nodes=4)
    fleet.advance(1.1, *NODES)
    assert fleet.job_state() is JobState.PAUSED
    assert "able to go on: n1, n2; the job needs 4 nodes and is paused until 2 come back" in fleet.job().status.sentence


def test_paused_job_reports_a_lost_node() -> None:
    fleet = _paused()
    since = fleet.job().status.since
    fleet.advance(120.0, "n1", "n2", "n4")
    assert "able to go on: n1, n2; " in fleet.job().status.sentence
    assert fleet.job().status.since == since


def test_paused_job_is_not_written_while_unchanged() -> None:
    fleet = _paused()
    fleet.advance(5.0, *NODES)
    assert not [effect for effect in fleet.advance(30.0, *NODES) if isinstance(effect, PutJob)]


def test_paused_job_keeps_its_cause_over_restart() -> None:
    fleet = _paused()
    fleet.restart()
    fleet.advance(5.0, *NODES)
    fleet.leave("n3")
    fleet.advance(1.1, *NODES)
    assert fleet.job().status.sentence.startswith("the launcher on n4 is gone; able to go on: n1, n2; ")
