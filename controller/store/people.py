"""Which lines of the audit log people wrote. They have a quota of their own, so that no node pushes them out."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, or_, text

from controller.store import tables

PREFIXES = ("operator.", "credential.")
"""How the kinds of lines begin that tell what people ordered."""
OF_NODES = "credential.enrolled"
"""The one among them that a node writes, with a join token."""

_KIND = tables.audit.c.kind
_KINDS = text(
    "WITH RECURSIVE seen(kind) AS (SELECT min(kind) FROM audit UNION ALL "
    "SELECT (SELECT min(kind) FROM audit WHERE kind > seen.kind) FROM seen WHERE seen.kind IS NOT NULL) "
    "SELECT kind FROM seen WHERE kind IS NOT NULL"
)


def wrote() -> ColumnElement[bool]:
    """Whether a line is theirs. The triggers of the audit log say the same (migration 0002)."""
    return and_(or_(*(_KIND.like(prefix + "%") for prefix in PREFIXES)), _KIND != OF_NODES)


def kinds(connection: Connection) -> list[str]:
    """Every kind of line that there is: a few dozen, each by one step in the index."""
    return list(connection.execute(_KINDS).scalars())


def kinds_they_wrote(connection: Connection) -> list[str]:
    """Those of them that people wrote."""
    return [kind for kind in kinds(connection) if kind.startswith(PREFIXES) and kind != OF_NODES]
