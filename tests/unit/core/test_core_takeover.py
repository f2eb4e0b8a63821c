"""What a controller that takes over in the middle of things must find out by itself."""

from __future__ import annotations

from tests.support.core_fleet import CoreFleet


def test_a_generation_whose_acknowledgements_an_earlier_controller_took_is_seen_to_step() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    fleet.progress(7)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().resumed_at is None
    fleet.progress(8)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().resumed_at is None
    fleet.progress(9)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().resumed_at is not None


def test_a_generation_of_its_own_counts_as_resumed_by_acknowledgements_alone() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().resumed_at is None
