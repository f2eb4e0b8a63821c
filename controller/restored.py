"""The core's state from what the database held."""

from __future__ import annotations

import msgspec

from controller.core import fleet
from controller.core.policy import CorePolicy
from controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from controller.core.state import FleetState
from controller.store.records import Loaded
from everstep.ids import Version


def restored(policy: CorePolicy, loaded: Loaded) -> FleetState:
    """The state as it was stored."""
    return fleet.restore(
        policy,
        msgspec.json.decode(loaded.fleet, type=FleetRecord) if loaded.fleet is not None else None,
        [msgspec.json.decode(doc, type=NodeRecord) for doc in loaded.nodes.values()],
        [msgspec.json.decode(doc, type=JobRecord) for doc in loaded.jobs.values()],
        [
            VersionRecord(
                job=row.job,
                version=Version(row.generation, row.step),
                committed_at=row.committed_at,
                verified_at=row.verified_at,
                bytes=row.bytes,
                ranks=row.ranks,
            )
            for row in loaded.versions
        ],
    )
