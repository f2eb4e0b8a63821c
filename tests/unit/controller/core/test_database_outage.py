from __future__ import annotations

import pytest
from everstep_controller.core.events import ControllerStarted, DatabaseAvailabilityChanged
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH

from tests.support.core_fleet import CoreFleet


def _running() -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes=3, spares=1, min_nodes=1)
    fleet.resume()
    fleet.feed(ControllerStarted(epoch=7))
    return fleet


@pytest.mark.promise("database-outage")
def test_unsent_generation_is_reissued_with_epoch_number() -> None:
    fleet = _running()
    fleet.lose_rank(0)
    untold = fleet.spec()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full", unsent_jobs=("job",)))
    told = fleet.spec()
    assert told.number == 7 * NUMBERS_PER_EPOCH + 1
    assert told.seated_nodes == untold.seated_nodes
    assert told.reason is untold.reason
    assert told.trace == untold.trace
    assert f"generation {untold.number} was decided but never announced" in told.sentence


def test_first_generation_of_job_waits_for_database() -> None:
    fleet = CoreFleet()
    fleet.start(nodes=2)
    formed = fleet.spec()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full", unsent_jobs=("job", "another")))
    assert fleet.spec() is formed


def test_only_unsent_generations_are_reissued() -> None:
    fleet = _running()
    before = fleet.spec()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    assert fleet.spec() is before
