"""Restore the core's state from the database, after setting its times back if a clock was ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection, update

from everstep.errors import DECODE_ERRORS
from everstep.ids import Version
from everstep.vocabulary import Finding
from everstep_controller.core import startup
from everstep_controller.core.effects import Remediation
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, MaintenanceWindow, NodeRecord, VersionRecord
from everstep_controller.core.state import FleetState
from everstep_controller.runtime.transaction import json_text, without_findings
from everstep_controller.store import table_access, tables
from everstep_controller.store.reader import NO_ROW_VERSIONS, RowVersions, changed_nodes
from everstep_controller.store.rows import Batch, CredentialRow, EventLogRow, LoadedState

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
                audited_at=row.audited_at,
                bytes=row.bytes,
                rank_count=row.ranks,
            )
            for row in loaded.versions
        ],
    )


# ---- times
# A clock that was ahead wrote times in the future, and the core must never see its time run backwards. Between two
# controllers' lifetimes its records are therefore changed as if the clock had never been ahead.

T = TypeVar("T")
ShiftTime = Callable[[float], float]
"""Converts a time of the wrong clock to the right clock."""

MAX_SET_BACK_S = 400 * 86400.0
"""No deadline lies further ahead, so a larger number is not a time."""
UNSHIFTED_FIELDS = ("maintenance_until", "value", "threshold")
"""Fields set by a person (like every field of a maintenance window), and fields whose numbers are not times."""
HISTORY = (
    tables.verdicts.c.at,
    tables.findings.c.at,
    tables.findings.c.cleared_at,
    tables.remediations.c.requested_at,
    tables.remediations.c.ended_at,
    tables.generations.c.issued_at,
    tables.versions.c.committed_at,
    tables.versions.c.verified_at,
    tables.versions.c.audited_at,
)
"""Columns by which history is sorted and deleted by age. The event log is append-only, and keeps its times."""


def set_times_back(loaded: LoadedState, known: KnownRecords, wall: float) -> tuple[LoadedState, Batch]:
    """Return the starting state with no past time later than ``wall``, and the batch that stores it.

    A time up to the newest one in the database becomes ``wall``. A later time was a deadline, and keeps its distance to
    the newest time. Times that people set do not change. ``known`` are the records that ``loaded`` leaves out.
    """
    newest = loaded.newest_at

    def move(at: float) -> float:
        if not wall < at < newest + MAX_SET_BACK_S:
            return at
        return wall if at <= newest else at - (newest - wall)

    def moved(doc: str, kind: type[Any]) -> str:
        return json_text(shift_times(msgspec.json.decode(doc, type=kind), move))

    records = [known.records[node] for node in loaded.unchanged]
    records += [msgspec.json.decode(doc, type=NodeRecord) for doc in loaded.nodes.values()]
    nodes = {record.node: json_text(shift_times(without_findings(record), move)) for record in records}
    jobs = {job: moved(doc, JobRecord) for job, doc in loaded.jobs.items()}
    fleet = loaded.fleet and moved(loaded.fleet, FleetRecord)
    remedies = [
        msgspec.structs.replace(shift_times(row, move), doc=moved(row.doc, Remediation)) for row in loaded.remediations
    ]
    credentials = [_credential(row, wall, move) for row in loaded.credentials]
    sentence = (
        f"an operator confirmed the clock (--trust-clock): the controller's time was set back by "
        f"{newest - wall:.0f} s, so earlier events may have later times"
    )
    line = EventLogRow(id=loaded.newest_event + 1, at=wall, kind=table_access.SET_BACK, sentence=sentence)
    batch = Batch(
        fleet=fleet,
        nodes=nodes,
        jobs=jobs,
        remediations={row.id: row for row in remedies},
        credentials={row.id: row for row in credentials},
        event_log=[line],
    )
    after = msgspec.structs.replace(
        loaded,
        fleet=fleet,
        unchanged=frozenset(),
        nodes=nodes,
        jobs=jobs,
        remediations=remedies,
        credentials=credentials,
        versions=[shift_times(row, move) for row in loaded.versions],
        newest_event=line.id,
        newest_at=wall,
    )
    return after, batch


def clamp_history(connection: Connection, wall: float) -> None:
    """Limit all times of the history to ``wall``, and store ``wall`` as the newest time."""
    for column in HISTORY:
        connection.execute(update(column.table).where(column > wall).values({column: wall}))
    table_access.mark(connection, wall)


def shift_times(value: T, shift: ShiftTime) -> T:
    """Return a copy of ``value``, a struct or a container, with each float shifted."""
    changed: Any = value
    if isinstance(value, float):
        changed = shift(value)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, MaintenanceWindow):
        names = [name for name in value.__struct_fields__ if name not in UNSHIFTED_FIELDS]
        changed = msgspec.structs.replace(value, **{name: shift_times(getattr(value, name), shift) for name in names})
    elif isinstance(value, dict):
        changed = {key: shift_times(item, shift) for key, item in value.items()}
    elif isinstance(value, list):
        changed = [shift_times(item, shift) for item in value]
    elif isinstance(value, tuple):
        changed = tuple(shift_times(item, shift) for item in value)
    result: T = changed
    return result


def _credential(row: CredentialRow, wall: float, move: ShiftTime) -> CredentialRow:
    """Shift a credential's times. The end of one issued under the right clock stays."""
    after = shift_times(row, move)
    return after if row.created_at > wall else msgspec.structs.replace(after, expires_at=row.expires_at)
