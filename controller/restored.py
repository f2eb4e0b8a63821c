"""The core's state from what the database held."""

from __future__ import annotations

import msgspec

from controller.core import fleet
from controller.core.policy import CorePolicy
from controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from controller.core.state import FleetState
from controller.store.records import Loaded
from everstep.ids import Version
from everstep.vocabulary import Finding


def restored(policy: CorePolicy, loaded: Loaded) -> FleetState:
    """The state as it was stored."""
    nodes = {node: msgspec.json.decode(doc, type=NodeRecord) for node, doc in loaded.nodes.items()}
    for (node, key), doc in loaded.standing.items():
        nodes[node].findings[key] = msgspec.json.decode(doc, type=Finding)
    return fleet.restore(
        policy,
        msgspec.json.decode(loaded.fleet, type=FleetRecord) if loaded.fleet is not None else None,
        list(nodes.values()),
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
