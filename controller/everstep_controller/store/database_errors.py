"""What a database error means to a person: one sentence that says what is wrong and how to mend it."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from everstep.errors import Unavailable

# ---- trouble
# What can become of a transaction, and which errors of a driver mean that the database is away.

_READ_ONLY = "25006"
"""SQLSTATE of a PostgreSQL that was demoted to a standby: its successor will answer at the same address."""


class Superseded(Unavailable):
    """Another controller took this database over; this one must not write any more."""


class Resigned(Superseded):
    """This controller gave its lease up: its nodes reach another one. The message says why."""


class DatabaseUnavailable(Unavailable):
    """The database cannot be used at present; the same write may succeed later. The message says why.

    ``kept``: the store holds the batch and writes it, unless that turns out to have been done, before any other.
    Otherwise nothing of it was written, and it is its caller's again.
    """

    def __init__(self, message: str, *, is_batch_kept: bool = False) -> None:
        super().__init__(message)
        self.is_batch_kept = is_batch_kept


def is_unavailable(error: DBAPIError) -> bool:
    """Whether ``error`` is the database's condition (gone, full, locked, slow, read-only), not what was asked of it."""
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY


_CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("password authentication failed", "no password supplied"), "the password or user is wrong: mend the URL"),
    (("role ", "does not exist"), "there is no such user: `createuser NAME`, or mend the URL"),
    (("database ", "does not exist"), "there is no such database: `createdb NAME`, or mend the URL"),
    (("could not translate host name",), "the host name does not resolve: mend the URL or the name service"),
    (("failed to resolve host",), "the host name does not resolve: mend the URL or the name service"),
    (("connection refused",), "nothing listens there: start PostgreSQL, or mend host and port in the URL"),
    (("no such file or directory",), "nothing listens on that socket: start PostgreSQL, or mend the URL"),
    (("timeout expired", "connection timeout"), "it does not answer: check the network, the firewall and the server"),
    (("no pg_hba.conf entry",), "the server does not admit this host: add a line to its pg_hba.conf"),
    (("permission denied",), "the user may not do this: `GRANT CREATE, USAGE ON SCHEMA public TO NAME`"),
    (("must be owner",), "the tables belong to another user: connect as their owner, or `ALTER TABLE ... OWNER TO`"),
    (("too many clients", "remaining connection slots"), "the server has no connection left: raise max_connections"),
    (("database or disk is full", "no space left", "disk full"), "the disk is full: make room on it"),
    (("readonly database", "read-only"), "the database cannot be written: check file permissions, or use the primary"),
    (("unable to open database file",), "the file cannot be opened: check that its directory exists and is writable"),
    (("file is not a database", "malformed"), "the file is damaged or no database: restore it from a backup"),
    (("disk i/o error",), "the disk fails or was unmounted: check it, then start again"),
    (("database is locked",), "another process holds the file: stop it (only one controller may write a file)"),
    (("append-only",), "the audit log may only grow: something tried to change it"),
    (("terminating connection", "server closed the connection", "connection is lost"), "the server went away"),
)
_ANY_OF = {"password authentication failed", "timeout expired", "too many clients", "database or disk is full"} | {
    "readonly database",
    "file is not a database",
    "terminating connection",
}


def redacted_url(url: URL) -> str:
    """The URL without its password."""
    return url.render_as_string(hide_password=True)


def _matches(marks: tuple[str, ...], text: str) -> bool:
    found = [mark in text for mark in marks]
    return any(found) if marks[0] in _ANY_OF else all(found)


def diagnose(error: Exception, url: URL) -> str:
    """A sentence for ``error`` at ``url``: what is wrong there, how to mend it, and the driver's own words."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    words = " ".join(str(cause).split())
    text = words.lower()
    mend = next((mend for marks, mend in _CAUSES if _matches(marks, text)), "see the driver's words")
    return f"the database at {redacted_url(url)} cannot be used: {mend} ({type(cause).__name__}: {words[:400]})"


# ---- cut
# Breaking off what hangs in a database's driver.


def abort_connection(connection: Connection) -> None:
    """Ends a connection under the thread that waits on it. Any thread may call this."""
    with contextlib.suppress(Exception):  # it may be closing, or closed, in its own thread at this moment
        driver: Any = connection.connection.dbapi_connection
        if connection.dialect.name == "sqlite":
            driver.interrupt()
            return
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
