"""The lease in the database: one row, and an advisory lock that lives as long as its leader's session.

Blocking, for one thread; ``abort`` alone may be called from another. PostgreSQL only. The lock belongs to a session, so
a pooler between must not share sessions out by transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from everstep_controller.leadership.lease import LeaseView, StandbyReport
from everstep_controller.store.database import application_name
from everstep_controller.store.database_errors import (
    DatabaseUnavailable,
    Superseded,
    abort_connection,
    diagnose,
    is_unavailable,
)
from everstep_controller.store.writer import Claim

T = TypeVar("T")

_LOCKS = 0x6576_7374
"""First half of the advisory locks' keys (``evst`` in ASCII); the second is the epoch."""
_KEYS = 1 << 31
SUCCESSOR_WAIT_S = 10.0
"""Seconds for which a lease that was given up waits for its successor; then the successor is taken for dead."""
CONTACTS_VALID_S = 5.0
"""Seconds for which a standby's count of knocks holds: it writes one every two."""
RESIGNATION_SERIES_S = 3600.0
"""Seconds between two resignations that belong together."""
CONTACTS_KEPT_S = 86400.0
"""Seconds until the counts of a controller that is there no more are deleted."""
_NOW = "extract(epoch from clock_timestamp())"

_LOOK = text(
    f"SELECT epoch, holder, address, expires_at - {_NOW} AS left_s, "  # noqa: S608 - constants of this file
    "(SELECT value FROM meta WHERE key = 'epoch') AS newest, "
    f"CASE WHEN resigned_at > {_NOW} - {SUCCESSOR_WAIT_S} THEN successor ELSE '' END AS successor, "
    f"pg_try_advisory_xact_lock({_LOCKS}, mod(epoch, {_KEYS})::int) AS free FROM lease WHERE id = 1"
)
_LOCK = text("SELECT pg_try_advisory_lock(:locks, :key)")
_UNLOCK_ALL = text("SELECT pg_advisory_unlock_all()")
_SPEAK = text("SELECT 1")
_WRITE = text("UPDATE lease SET address = address WHERE id = 1")
_RENEW = text(
    f"UPDATE lease SET renewed_at = {_NOW}, expires_at = {_NOW} + :lease_s "  # noqa: S608 - as above
    "WHERE id = 1 AND epoch = :epoch"
)
_TELL = text(
    f"WITH gone AS (DELETE FROM standby_contacts WHERE reported_at < {_NOW} - {CONTACTS_KEPT_S} "  # noqa: S608
    "AND controller <> :controller) "
    f"INSERT INTO standby_contacts (controller, nodes, reported_at) VALUES (:controller, :nodes, {_NOW}) "
    "ON CONFLICT (controller) DO UPDATE SET nodes = excluded.nodes, reported_at = excluded.reported_at"
)
_TOLD = text(
    f"SELECT CASE WHEN resigned_at > {_NOW} - {RESIGNATION_SERIES_S} THEN resignations ELSE 0 END AS resignations, "  # noqa: S608
    "controller, nodes FROM lease LEFT JOIN standby_contacts ON controller <> holder "
    f"AND reported_at > {_NOW} - {CONTACTS_VALID_S} "
    "WHERE id = 1"
)
_RESIGN = text(
    f"UPDATE lease SET successor = :successor, resigned_at = {_NOW}, "  # noqa: S608 - as above
    f"resignations = CASE WHEN resigned_at > {_NOW} - {RESIGNATION_SERIES_S} THEN resignations + 1 ELSE 1 END "
    "WHERE id = 1 AND epoch = :epoch"
)
_END = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :application "
    "AND datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
)
_END_SILENT = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name IN ("
    "SELECT holding.application_name FROM pg_locks JOIN pg_stat_activity AS holding USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid::bigint = :locks AND objid::bigint = :key AND objsubid = 2 "
    "AND datname = current_database() "
    "AND state = 'idle' AND state_change < clock_timestamp() - make_interval(secs => :silent_s)) "
    "AND datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
)
_CLAIM = text(
    f"UPDATE lease SET epoch = :epoch, holder = :holder, address = :address, successor = '', "  # noqa: S608 - as above
    f"renewed_at = {_NOW}, expires_at = {_NOW} + :lease_s WHERE id = 1 AND (:free OR expires_at <= {_NOW})"
)


def claim(holder: str, address: str, lease_s: float, *, is_lock_free: bool) -> Claim:
    """What makes a take-over's transaction take the lease as well.

    Args:
        free: its holder's session is gone. Otherwise the lease must be over by now: one that was renewed meanwhile
            makes its holder sure for as long, and raises Superseded.
    """

    def write(connection: Connection, epoch: int) -> None:
        values = {"epoch": epoch, "holder": holder, "address": address, "lease_s": lease_s, "free": is_lock_free}
        if connection.execute(_CLAIM, values).rowcount == 0:
            raise Superseded("the lease was renewed meanwhile")

    return write


class LeaseSession:
    """A session of its own, so that it lives exactly as long as its process and no transaction holds it up.

    Every method raises StoreAway where the database cannot be used; the session is then made anew by the next call,
    and its locks are gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._held: set[int] = set()

    def read(self) -> LeaseView:
        """The lease as it is. What a take-over that came to nothing had locked is free afterwards."""
        if self._held:
            self._execute(lambda connection: connection.execute(_UNLOCK_ALL))
            self._held.clear()
        row = self._execute(lambda connection: connection.execute(_LOOK).one())
        return LeaseView(
            epoch=row.epoch,
            newest_epoch=row.newest,
            holder=row.holder,
            address=row.address,
            expires_in_s=float(row.left_s),
            is_lock_free=row.free,
            successor=row.successor,
        )

    def lock_epoch(self, epoch: int) -> bool:
        """Takes the lock of ``epoch``; False while another session has it."""
        if epoch in self._held and self._connection is not None:
            return True
        taken: bool = self._execute(lambda connection: connection.execute(_LOCK, _key(epoch)).scalar_one())
        if taken:
            self._held.add(epoch)
        return taken

    def try_writing(self) -> None:
        """Changes nothing. Raises StoreAway also where the database only answers: one that is read-only, or full."""
        self._execute(lambda connection: connection.execute(_WRITE))

    def touch(self) -> None:
        """Shows that whoever holds a lock in this session is alive; see ``end_silent_holder``."""
        self._execute(lambda connection: connection.execute(_SPEAK).scalar_one())

    def end_sessions_of(self, holder: str) -> None:
        """Ends the database sessions of a controller whose lease is over. One that was stopped inside a transaction
        holds a lock that its successor needs; in the middle of a pipeline no time-out of the server's sees that."""
        self._execute(lambda connection: connection.execute(_END, {"application": application_name(holder)}).all())

    def end_silent_holder(self, epoch: int, silent_s: float) -> None:
        """Ends the database sessions of whoever holds the lock of ``epoch`` and has said nothing in the session that
        does for ``silent_s``: a controller that was stopped, or lost its machine, before its lease could begin."""
        self._execute(lambda connection: connection.execute(_END_SILENT, {**_key(epoch), "silent_s": silent_s}).all())

    def renew(self, epoch: int, lease_s: float) -> None:
        """Another ``lease_s`` from now on, by the database's clock. Raises Superseded where another one has it."""
        values = {"epoch": epoch, "lease_s": lease_s}
        if self._execute(lambda connection: connection.execute(_RENEW, values).rowcount) == 0:
            raise Superseded(f"another controller has taken the lease of epoch {epoch}")

    def write_contacts(self, controller: str, nodes: int) -> None:
        """Writes down how many nodes insist on a controller that stands by."""
        self._execute(lambda connection: connection.execute(_TELL, {"controller": controller, "nodes": nodes}))

    def read_standby_report(self) -> StandbyReport:
        """What those that stand by have written down in the last seconds."""
        rows = self._execute(lambda connection: connection.execute(_TOLD).all())
        knocks = {row.controller: row.nodes for row in rows if row.controller is not None}
        return StandbyReport(contacts=knocks, resignations=rows[0].resignations)

    def resign(self, epoch: int, successor: str) -> None:
        """Keeps the lease for ``successor``, from the end of this session on. Raises Superseded where another one has
        it."""
        values = {"epoch": epoch, "successor": successor}
        if self._execute(lambda connection: connection.execute(_RESIGN, values).rowcount) == 0:
            raise Superseded(f"another controller has taken the lease of epoch {epoch}")

    def close(self) -> None:
        """Ends the session; its locks are free at once."""
        connection, self._connection = self._connection, None
        self._held.clear()
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Makes a call that hangs in the other thread fail soon. Any thread."""
        connection = self._connection
        if connection is not None:
            abort_connection(connection)

    def _execute(self, question: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                self._connection.detach()  # so that its end is the session's end
            return question(self._connection)
        except BaseException as error:
            self.close()
            if isinstance(error, DBAPIError) and is_unavailable(error):
                raise DatabaseUnavailable(diagnose(error, self._engine.url)) from error
            raise


def _key(epoch: int) -> dict[str, int]:
    return {"locks": _LOCKS, "key": epoch % _KEYS}
