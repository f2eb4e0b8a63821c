"""The context of the operators' views of a fleet without a running controller."""

from __future__ import annotations

from everstep_controller.read_models.fleet_views import ViewContext
from everstep_controller.runtime.push import Outbox
from tests.support.fleet.core_fleet import CoreFleet


def view_context_of(fleet: CoreFleet) -> ViewContext:
    """Return the context of the views at the time of the fleet."""
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
