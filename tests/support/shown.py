"""What operators are shown of a fleet that no controller runs."""

from __future__ import annotations

from everstep_controller.read_models.fleet_views import ViewContext
from everstep_controller.runtime.push import Outbox

from tests.support.core_fleet import CoreFleet


def desk_of(fleet: CoreFleet) -> ViewContext:
    """The views' window on the fleet, at its own time."""
    return ViewContext(
        state=fleet.state,
        outbox=Outbox(1),
        epoch=1,
        started_at=fleet.now,
        now=lambda: fleet.now,
        lag_s=lambda: 0.0,
        queued=lambda: 0,
        newest_event=lambda: 0,
    )
