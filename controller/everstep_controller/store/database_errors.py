"""Define database errors, and diagnose driver errors in sentences that say what is wrong and how to correct it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from everstep.errors import Unavailable
from everstep.printable_text import valid_unicode

_READ_ONLY = "25006"
"""SQLSTATE of a PostgreSQL server that was demoted to a standby: its successor will answer at the same address."""


class LeadershipLost(Unavailable):
    """Another controller took over this database; this one must not write any more."""


class LeaseResigned(LeadershipLost):
    """This controller gave up its lease because nodes reach another one. The message has the reason."""


class DatabaseUnavailable(Unavailable):
    """The database cannot be used at present; the same write may succeed later. The message has the reason.

    If ``is_batch_queued``, the store keeps the batch, and writes it before any other unless it was written after all.
    Otherwise nothing of it was written, and the caller keeps it.
    """

    def __init__(self, message: str, *, is_batch_queued: bool = False) -> None:
        super().__init__(message)
        self.is_batch_queued = is_batch_queued


class DatabaseOutage(msgspec.Struct):
    """An outage of the database."""

    since: float  # start, in the loop's seconds
    reason: str  # cause, from the newest attempt
    buffered_bytes: int = 0


def is_unavailable(error: DBAPIError) -> bool:
    """Return whether ``error`` is caused by the database's condition (gone, full, locked, slow, read-only)."""
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY


_CAUSES = {
    "password authentication failed|no password supplied": "the password or user is wrong: correct the URL",
    "role .*does not exist": "there is no such user: `createuser NAME`, or correct the URL",
    "database .*does not exist": "there is no such database: `createdb NAME`, or correct the URL",
    "could not translate host name|failed to resolve host": "the host name does not resolve: correct the URL or the "
    "name service",
    "connection refused": "nothing listens there: start PostgreSQL, or correct host and port in the URL",
    "no such file or directory": "nothing listens on that socket: start PostgreSQL, or correct the URL",
    "timeout expired|connection timeout": "the server does not answer: check it, the network and the firewall",
    "no pg_hba.conf entry": "the server does not admit this host: add a line to its pg_hba.conf",
    "permission denied": "the user lacks a permission: `GRANT CREATE, USAGE ON SCHEMA public TO NAME`",
    "must be owner": "the tables belong to another user: connect as their owner, or `ALTER TABLE ... OWNER TO`",
    "too many clients|remaining connection slots": "the server has no connection left: raise max_connections",
    "database or disk is full|no space left|disk full": "the disk is full: free some space",
    "readonly database|read-only": "the database cannot be written: check file permissions, or use the primary",
    "unable to open database file": "the file cannot be opened: check that its directory exists and is writable",
    "file is not a database|malformed": "the file is damaged or not a database: restore it from a backup",
    "disk i/o error": "the disk fails or was unmounted: check it, then restart the controller",
    "database is locked": "another process holds the file: stop it (only one controller may write a file)",
    "append-only": "the event log is append-only: something tried to change it",
    "terminating connection|server closed the connection|connection is lost": "the server is gone: check its log",
}
"""Advice by a pattern in the driver's message; the first match counts."""


def redacted_url(url: URL) -> str:
    """Return the URL without its password."""
    return url.set(database=url.database and valid_unicode(url.database)).render_as_string(hide_password=True)


def diagnose(error: Exception, url: URL) -> str:
    """Return a sentence for ``error`` at ``url``: the problem, the remedy, and the driver's message."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    message = " ".join(str(cause).split())
    found = (advice for pattern, advice in _CAUSES.items() if re.search(pattern, message.lower()))
    advice = next(found, "see the driver's message")
    return f"the database at {redacted_url(url)} cannot be used: {advice} ({type(cause).__name__}: {message[:400]})"


def abort_connection(connection: Connection) -> None:
    """Abort a connection that another thread is waiting on. Any thread may call this."""
    with contextlib.suppress(Exception):  # its own thread may be closing it at this moment
        driver: Any = connection.connection.dbapi_connection
        if connection.dialect.name == "sqlite":
            driver.interrupt()
            return
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
