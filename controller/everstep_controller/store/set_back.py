"""Set the times in a database back, after a clock that was ahead wrote times that have not come yet.

The core must never see its time run backwards. So it is not told: between two lives of a controller its records are
changed as if the wrong clock had never been ahead, and the next life begins with the right time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, update

from everstep_controller.core.effects import Remedy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord, Window
from everstep_controller.runtime.startup_state import Known
from everstep_controller.runtime.transaction import without_findings
from everstep_controller.store import table_access, tables
from everstep_controller.store.rows import AuditRow, Batch, CredentialRow, Loaded

T = TypeVar("T")
Move = Callable[[float], float]
"""Makes a time of the wrong clock one of the right clock."""

FARTHEST_S = 400 * 86400.0
"""Nothing is due later than this after it was written, so a larger number is no time."""
NOT_MOVED = ("maintenance_until", "value", "threshold")
"""Fields that a person chose (as all of a ``Window``), or whose numbers are no times."""
HISTORY = (
    tables.verdicts.c.at,
    tables.findings.c.at,
    tables.findings.c.cleared_at,
    tables.remedies.c.requested_at,
    tables.remedies.c.ended_at,
    tables.generations.c.issued_at,
    tables.versions.c.committed_at,
    tables.versions.c.verified_at,
)
"""Columns by which history is sorted, and deleted by age. The audit log is append-only, and keeps its times."""


def set_back(loaded: Loaded, known: Known, wall: float) -> tuple[Loaded, Batch]:
    """What the next life starts from, with no time of the past later than ``wall``, and the batch that stores it.

    A time up to the newest one in the database becomes ``wall``. A later one was due some time after that, and stays
    as long after ``wall``. Times that people set stay as they are.

    Args:
        loaded: as it was read, with ``newest_at`` later than ``wall``.
        known: the records that ``loaded`` leaves out.
        wall: wall seconds of the right clock.
    """
    newest = loaded.newest_at

    def move(at: float) -> float:
        if not wall < at < newest + FARTHEST_S:
            return at
        return wall if at <= newest else at - (newest - wall)

    records = [known.records[node] for node in loaded.same]
    records += [msgspec.json.decode(doc, type=NodeRecord) for doc in loaded.nodes.values()]
    nodes = {record.node: _text(moved(without_findings(record), move)) for record in records}
    jobs = {job: _text(moved(msgspec.json.decode(doc, type=JobRecord), move)) for job, doc in loaded.jobs.items()}
    fleet = None
    if loaded.fleet is not None:
        fleet = _text(moved(msgspec.json.decode(loaded.fleet, type=FleetRecord), move))
    remedies = [
        msgspec.structs.replace(moved(row, move), doc=_text(moved(msgspec.json.decode(row.doc, type=Remedy), move)))
        for row in loaded.remedies
    ]
    credentials = [_credential(row, wall, move) for row in loaded.credentials]
    line = AuditRow(
        id=loaded.newest_audit + 1,
        at=wall,
        kind=table_access.SET_BACK,
        sentence=(
            f"an operator vouched for the clock (--trust-clock): the controller's time was set back by "
            f"{newest - wall:.0f} s, and earlier events may carry later times"
        ),
    )
    batch = Batch(
        fleet=fleet,
        nodes=nodes,
        jobs=jobs,
        remedies={row.id: row for row in remedies},
        credentials={row.id: row for row in credentials},
        audit=[line],
    )
    after = msgspec.structs.replace(
        loaded,
        fleet=fleet,
        same=frozenset(),
        nodes=nodes,
        jobs=jobs,
        remedies=remedies,
        credentials=credentials,
        versions=[moved(row, move) for row in loaded.versions],
        newest_audit=line.id,
        newest_at=wall,
    )
    return after, batch


def clamp_history(connection: Connection, wall: float) -> None:
    """Lets no row of the history be later than ``wall``, and notes ``wall`` as the newest time."""
    for column in HISTORY:
        connection.execute(update(column.table).where(column > wall).values({column: wall}))
    table_access.mark(connection, wall)


def moved(value: T, move: Move) -> T:
    """A copy of ``value``, a struct or a container, with each float in it moved."""
    changed: Any = value
    if isinstance(value, float):
        changed = move(value)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, Window):
        names = [name for name in value.__struct_fields__ if name not in NOT_MOVED]
        changed = msgspec.structs.replace(value, **{name: moved(getattr(value, name), move) for name in names})
    elif isinstance(value, dict):
        changed = {key: moved(one, move) for key, one in value.items()}
    elif isinstance(value, list):
        changed = [moved(one, move) for one in value]
    elif isinstance(value, tuple):
        changed = tuple(moved(one, move) for one in value)
    result: T = changed
    return result


def _credential(row: CredentialRow, wall: float, move: Move) -> CredentialRow:
    """The end of a credential that was issued under the right clock is right."""
    after = moved(row, move)
    return after if row.created_at > wall else msgspec.structs.replace(after, expires_at=row.expires_at)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
