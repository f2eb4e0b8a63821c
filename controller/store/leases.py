"""The lease in the database: one row, and an advisory lock that lives as long as its leader's session.

Blocking, for one thread; ``abort`` alone may be called from another. PostgreSQL only. The lock belongs to a session, so
a pooler between must not share sessions out by transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from controller.lease import Seen
from controller.store.cut import cut
from controller.store.database import application_of
from controller.store.diagnose import diagnose
from controller.store.trouble import StoreAway, Superseded, is_away
from controller.store.writer import Claim

T = TypeVar("T")

_LOCKS = 0x6576_7374
"""First half of the advisory locks' keys (``evst`` in ASCII); the second is the epoch."""
_KEYS = 1 << 31
_NOW = "extract(epoch from clock_timestamp())"

_LOOK = text(
    f"SELECT epoch, holder, address, expires_at - {_NOW} AS left_s, "  # noqa: S608 - constants of this file
    "(SELECT value FROM meta WHERE key = 'epoch') AS newest, "
    f"pg_try_advisory_lock({_LOCKS}, mod(epoch, {_KEYS})::int) AS free FROM lease WHERE id = 1"
)
_LOCK = text("SELECT pg_try_advisory_lock(:locks, :key)")
_UNLOCK = text("SELECT pg_advisory_unlock(:locks, :key)")
_RENEW = text(
    f"UPDATE lease SET renewed_at = {_NOW}, expires_at = {_NOW} + :lease_s "  # noqa: S608 - as above
    "WHERE id = 1 AND epoch = :epoch"
)
_END = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :application "
    "AND datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
)
_CLAIM = text(
    f"UPDATE lease SET epoch = :epoch, holder = :holder, address = :address, "  # noqa: S608 - as above
    f"renewed_at = {_NOW}, expires_at = {_NOW} + :lease_s WHERE id = 1"
)


def claim(holder: str, address: str, lease_s: float) -> Claim:
    """What makes a take-over's transaction take the lease as well."""

    def write(connection: Connection, epoch: int) -> None:
        connection.execute(_CLAIM, {"epoch": epoch, "holder": holder, "address": address, "lease_s": lease_s})

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

    def look(self) -> Seen:
        """The lease as it is. A lock that was free is ours now: ``let_go`` of it before the next look."""
        row = self._asked(lambda connection: connection.execute(_LOOK).one())
        if row.free:
            self._held.add(row.epoch)
        return Seen(
            epoch=row.epoch,
            newest=row.newest,
            holder=row.holder,
            address=row.address,
            expires_in_s=float(row.left_s),
            free=row.free,
        )

    def hold(self, epoch: int) -> bool:
        """Takes the lock of ``epoch``; False while another session has it."""
        if epoch in self._held and self._connection is not None:
            return True
        taken: bool = self._asked(lambda connection: connection.execute(_LOCK, _key(epoch)).scalar_one())
        if taken:
            self._held.add(epoch)
        return taken

    def let_go(self, epoch: int) -> None:
        """Gives the lock of ``epoch`` back, if it is ours."""
        if epoch in self._held:
            self._held.discard(epoch)
            self._asked(lambda connection: connection.execute(_UNLOCK, _key(epoch)).scalar_one())

    def end_sessions_of(self, holder: str) -> None:
        """Ends the database sessions of a controller whose lease is over. One that was stopped inside a transaction
        holds a lock that its successor needs; in the middle of a pipeline no time-out of the server's sees that."""
        self._asked(lambda connection: connection.execute(_END, {"application": application_of(holder)}).all())

    def renew(self, epoch: int, lease_s: float) -> None:
        """Another ``lease_s`` from now on, by the database's clock. Raises Superseded where another one has it."""
        values = {"epoch": epoch, "lease_s": lease_s}
        if self._asked(lambda connection: connection.execute(_RENEW, values).rowcount) == 0:
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
            cut(connection)

    def _asked(self, question: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                self._connection.detach()  # so that its end is the session's end
            return question(self._connection)
        except BaseException as error:
            self.close()
            if isinstance(error, DBAPIError) and is_away(error):
                raise StoreAway(diagnose(error, self._engine.url)) from error
            raise


def _key(epoch: int) -> dict[str, int]:
    return {"locks": _LOCKS, "key": epoch % _KEYS}
