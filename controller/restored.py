"""The core's state from what the database held."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from controller.core import fleet
from controller.core.policy import CorePolicy
from controller.core.records import Eviction, FleetRecord, JobRecord, NodeRecord, VersionRecord
from controller.core.state import FleetState
from controller.read_ahead import NOTHING, Known
from controller.store.records import Loaded
from everstep.ids import Version
from everstep.vocabulary import Finding


class _FirstFleet(msgspec.Struct):
    """The fleet's document under schema 0001: evictions by time alone."""

    evictions: list[float] = []


def _fleet(doc: str, nodes: Iterable[NodeRecord]) -> FleetRecord:
    """The fleet's record. What schema 0001 counted against the budget is found again at the nodes."""
    record, times = msgspec.json.decode(doc, type=FleetRecord), msgspec.json.decode(doc, type=_FirstFleet).evictions
    if times:
        known = [
            Eviction(at=at, node=node.node, rack=node.domain.rack)
            for node in nodes
            for at in node.evictions
            if at in times
        ]
        record.evicted = sorted(known, key=lambda one: one.at)
    return record


def restored(policy: CorePolicy, loaded: Loaded, known: Known = NOTHING) -> FleetState:
    """The state as it was stored, made of the ``known`` records themselves."""
    nodes = {node: known.records[node] for node in loaded.same}
    nodes |= {node: msgspec.json.decode(doc, type=NodeRecord) for node, doc in loaded.nodes.items()}
    for (node, key), doc in loaded.standing.items():
        nodes[node].findings[key] = msgspec.json.decode(doc, type=Finding)
    return fleet.restore(
        policy,
        _fleet(loaded.fleet, nodes.values()) if loaded.fleet is not None else None,
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
