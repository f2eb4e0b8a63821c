"""Store the lease: one database row, and an advisory lock that lives as long as its leader's session.

Blocking, for one thread; only ``abort`` may be called from another. PostgreSQL only. The lock belongs to a session, so
a connection pooler must not share sessions between transactions.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, CursorResult, Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from everstep_controller.store import database_errors
from everstep_controller.store.database import application_name
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from everstep_controller.store.rows import LeaseView, StandbyReport
from everstep_controller.store.writer import Claim

_LOCKS = 0x6576_7374
"""First half of the advisory locks' keys (``evst`` in ASCII); the second is the epoch."""
_KEYS = 1 << 31
SUCCESSOR_WAIT_S = 10.0
"""Seconds that a lease after a resignation waits for its successor; then the successor counts as dead."""
CONTACTS_VALID_S = 5.0
"""Seconds that a standby's count of contacting nodes is valid; it is written every two seconds."""
RESIGNATION_SERIES_S = 3600.0
"""Maximum seconds between two resignations of one series."""
CONTACTS_RETENTION_S = 86400.0
"""Seconds until the counts of a vanished controller are deleted."""
_NOW = "extract(epoch from clock_timestamp())"

_READ_LEASE = text(
    f"SELECT epoch, holder, address, expires_at - {_NOW} AS expires_in_s, "  # noqa: S608 - constants of this file
    "(SELECT value FROM meta WHERE key = 'epoch') AS newest_epoch, "
    f"CASE WHEN resigned_at > {_NOW} - {SUCCESSOR_WAIT_S} THEN successor ELSE '' END AS successor, "
    f"pg_try_advisory_xact_lock({_LOCKS}, mod(epoch, {_KEYS})::int) AS is_lock_free FROM lease WHERE id = 1"
)
_LOCK = text("SELECT pg_try_advisory_lock(:locks, :key)")
_UNLOCK_ALL = text("SELECT pg_advisory_unlock_all()")
_PING = text("SELECT 1")
_WRITE = text("UPDATE lease SET address = address WHERE id = 1")
_RENEW = text(
    f"UPDATE lease SET renewed_at = {_NOW}, expires_at = {_NOW} + :lease_s "  # noqa: S608 - as above
    "WHERE id = 1 AND epoch = :epoch"
)
_WRITE_CONTACTS = text(
    f"WITH gone AS (DELETE FROM standby_contacts WHERE reported_at < {_NOW} - {CONTACTS_RETENTION_S} "  # noqa: S608
    "AND controller <> :controller) "
    f"INSERT INTO standby_contacts (controller, nodes, reported_at) VALUES (:controller, :nodes, {_NOW}) "
    "ON CONFLICT (controller) DO UPDATE SET nodes = excluded.nodes, reported_at = excluded.reported_at"
)
_READ_STANDBY_REPORT = text(
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
_END_SESSIONS = text(
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
    """Return a function that takes an expired lease, or any if ``is_lock_free``, and else raises LeadershipLost."""

    def write(connection: Connection, epoch: int) -> None:
        values = {"epoch": epoch, "holder": holder, "address": address, "lease_s": lease_s, "free": is_lock_free}
        if connection.execute(_CLAIM, values).rowcount == 0:
            raise LeadershipLost("the old leader renewed its lease meanwhile")

    return write


class LeaseSession:
    """A dedicated database session, outside any transaction; after DatabaseUnavailable the next call opens another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._held: set[int] = set()

    def read(self) -> LeaseView:
        """Return the current lease. Releases locks left by a failed take-over."""
        if self._held:
            self._execute(_UNLOCK_ALL)
            self._held.clear()
        return LeaseView(**self._execute(_READ_LEASE).mappings().one())

    def lock_epoch(self, epoch: int) -> bool:
        """Take the lock of ``epoch``. Return False while another session has it."""
        if epoch in self._held and self._connection is not None:
            return True
        taken: bool = self._execute(_LOCK, **_key(epoch)).scalar_one()
        if taken:
            self._held.add(epoch)
        return taken

    def try_writing(self) -> None:
        """Write without a change. Raises DatabaseUnavailable also if the database is read-only or full."""
        self._execute(_WRITE)

    def touch(self) -> None:
        """Show that this session's lock holder is alive; see ``end_silent_holder``."""
        self._execute(_PING)

    def end_sessions_of(self, holder: str) -> None:
        """End the sessions of a controller whose lease is over: if paused, it may hold a lock."""
        self._execute(_END_SESSIONS, application=application_name(holder))

    def end_silent_holder(self, epoch: int, silent_s: float) -> None:
        """End the sessions of the lock holder of ``epoch`` if it was silent for ``silent_s``, for example paused."""
        self._execute(_END_SILENT, **_key(epoch), silent_s=silent_s)

    def renew(self, epoch: int, lease_s: float) -> None:
        """Extend the lease to ``lease_s`` from now. Raises LeadershipLost if another controller has it."""
        self._update(_RENEW, epoch=epoch, lease_s=lease_s)

    def write_contacts(self, controller: str, nodes: int) -> None:
        """Store the number of nodes that contact a standby persistently."""
        self._execute(_WRITE_CONTACTS, controller=controller, nodes=nodes)

    def read_standby_report(self) -> StandbyReport:
        """Return the recent reports of standbys."""
        rows = self._execute(_READ_STANDBY_REPORT).all()
        contacts = {row.controller: row.nodes for row in rows if row.controller is not None}
        return StandbyReport(contacts=contacts, resignations=rows[0].resignations)

    def resign(self, epoch: int, successor: str) -> None:
        """Reserve the lease for ``successor`` from this session's end. Raises LeadershipLost if another one has it."""
        self._update(_RESIGN, epoch=epoch, successor=successor)

    def close(self) -> None:
        """End the session, which frees its locks at once."""
        connection, self._connection = self._connection, None
        self._held.clear()
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Make a call that hangs in the other thread fail soon. Any thread may call this."""
        if self._connection is not None:
            database_errors.abort_connection(self._connection)

    def _update(self, statement: TextClause, *, epoch: int, **values: Any) -> None:
        if self._execute(statement, epoch=epoch, **values).rowcount == 0:
            raise LeadershipLost(f"another controller has taken the lease of epoch {epoch}")

    def _execute(self, statement: TextClause, **values: Any) -> CursorResult[Any]:
        try:
            if self._connection is None:
                self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                self._connection.detach()  # so that closing it ends the session
            return self._connection.execute(statement, values)
        except BaseException as error:
            self.close()
            if isinstance(error, DBAPIError) and database_errors.is_unavailable(error):
                raise DatabaseUnavailable(database_errors.diagnose(error, self._engine.url)) from error
            raise


def _key(epoch: int) -> dict[str, int]:
    return {"locks": _LOCKS, "key": epoch % _KEYS}
