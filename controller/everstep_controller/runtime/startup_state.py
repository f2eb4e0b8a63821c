"""Restore the core's state from the database."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from everstep.errors import DECODE_ERRORS
from everstep.ids import Version
from everstep.vocabulary import Finding
from everstep_controller.core import startup
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from everstep_controller.core.state import FleetState
from everstep_controller.store.reader import NO_ROW_VERSIONS, RowVersions, changed_nodes
from everstep_controller.store.rows import LoadedState

# ---- read ahead
# A fleet whose leader died waits while its successor restores the state, which consists mostly of node records. Records
# change seldom (a heartbeat changes none). A standby that reads ahead has decoded nearly all of them, and reads only
# the changed ones in the transaction that takes the database over.


class KnownRecords(NamedTuple):
    """Records and their row versions, by node. Immutable: the next reading makes a new one."""

    row_versions: RowVersions
    records: dict[str, NodeRecord]


NO_RECORDS = KnownRecords(NO_ROW_VERSIONS, {})


def read_records(connection: Connection, known: KnownRecords) -> KnownRecords:
    """Return ``known`` brought up to date. Raises the database's errors. For a thread of its own."""
    found = changed_nodes(connection, known.row_versions)
    versions = {node: known.row_versions.nodes[node] for node in found.unchanged}
    records = {node: known.records[node] for node in found.unchanged}
    for row in found.rows:
        try:
            records[row.node] = msgspec.json.decode(row.doc, type=NodeRecord)
        except DECODE_ERRORS:  # written by another release; the leader reports it
            continue
        versions[row.node] = row.row_version
    return KnownRecords(RowVersions(found.server, versions), records)


def restore_state(policy: CorePolicy, loaded: LoadedState, known: KnownRecords = NO_RECORDS) -> FleetState:
    """Return the stored state. It contains the ``known`` record objects themselves."""
    nodes = {node: known.records[node] for node in loaded.unchanged}
    nodes |= {node: msgspec.json.decode(doc, type=NodeRecord) for node, doc in loaded.nodes.items()}
    for (node, key), doc in loaded.active_findings.items():
        nodes[node].health.agent_findings[key] = msgspec.json.decode(doc, type=Finding)
    return startup.restore_state(
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
                rank_count=row.ranks,
            )
            for row in loaded.versions
        ],
    )
