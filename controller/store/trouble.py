"""What can become of a transaction, and which errors of a driver mean that the database is away."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from everstep.errors import Unavailable

_READ_ONLY = "25006"
"""SQLSTATE of a PostgreSQL that was demoted to a standby: its successor will answer at the same address."""


class Superseded(Unavailable):
    """Another controller took this database over; this one must not write any more."""


class Resigned(Superseded):
    """This controller gave its lease up: its nodes reach another one. The message says why."""


class StoreAway(Unavailable):
    """The database cannot be used at present; the same write may succeed later. The message says why.

    ``kept``: the store holds the batch and writes it, unless that turns out to have been done, before any other.
    Otherwise nothing of it was written, and it is its caller's again.
    """

    def __init__(self, message: str, *, kept: bool = False) -> None:
        super().__init__(message)
        self.kept = kept


def is_away(error: DBAPIError) -> bool:
    """Whether ``error`` is the database's condition (gone, full, locked, slow, read-only), not what was asked of it."""
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY
