"""Open, migrate, check and back up the database."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from everstep.errors import ConfigurationError
from everstep_controller.store.database_errors import diagnose, redacted_url
from everstep_controller.store.table_access import COPY_EPOCH_GAP
from everstep_controller.store.tables import HEAD


def upgrade(connection: Connection) -> None:
    """Run the missing migrations in the connection's transaction."""
    config = Config()
    config.set_main_option("script_location", "everstep_controller.store:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


# ---- damage check
# SQLite opens a truncated or partly overwritten file, and fails only when it reads the damaged pages, perhaps hours
# later. ``PRAGMA quick_check`` reads every page once.

log = logging.getLogger(__name__)

_BUSY_S = 5.0


def check_file(path: Path) -> None:
    """Read the whole file once (missing or empty: a new database). Raises ConfigurationError if it is damaged."""
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return
    log.info("checking the database %s (%d MiB) for damage", path, size >> 20)
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:  # locked or unreadable: the error from opening says what to do
        log.warning("the database %s could not be checked for damage: %s", path, error)
        return
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        damage = "; ".join(line for line in found.splitlines() if not line.startswith("***"))
        raise ConfigurationError(
            f"the database file {path} is damaged (SQLite: {damage[:300]}). Move it and its -wal and -shm files to "
            "another folder, put the newest backup in its place and start again (see docs/how-to/back-up.md)"
        )


BUSY_TIMEOUT_MS = 5000
"""Milliseconds that SQLite waits for another process's lock: enough for a backup, and short enough to be noticed."""

CONNECT_TIMEOUT_S = 3
STATEMENT_TIMEOUT_MS = 10_000
"""PostgreSQL ends a statement that takes longer; the controller has given it up before."""

_MIGRATION_LOCK = 0x6576_6572_7374_6570
"""PostgreSQL advisory lock (``everstep`` in ASCII): one of several starting controllers migrates."""

FOR_WRITING = {"everstep_write": True}
"""Options of a connection that takes SQLite's write lock at BEGIN, where a conflict can still be waited for."""
_migrating = threading.Lock()


def parse_url(database: str) -> URL:
    """Return the database's URL with our drivers filled in. Raises ConfigurationError for an unsupported kind."""
    try:
        url = make_url(database)
    except ArgumentError:
        raise ConfigurationError(
            f"{database.split('@')[-1]!r} is not a database URL: use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
        ) from None
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "postgresql+psycopg"):
        return url
    raise ConfigurationError(
        f"databases of kind {url.drivername!r} are not supported: use sqlite:///PATH or postgresql://..."
    )


def _private_file(path: str) -> None:
    """Create the SQLite file readable by its owner only, because it holds secrets. Warn if others can read it."""
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise ConfigurationError(f"the database's directory {parent} does not exist: run `mkdir -p {parent}`")
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        if mode & 0o077:
            log.warning("other users can read %s and its secrets (mode %04o): run `chmod 600 %s`", path, mode, path)
    except OSError as error:
        raise ConfigurationError(
            f"the database file {path} cannot be opened: {error.strerror}; check its and {parent}'s owner and mode"
        ) from error


def _sqlite_engine(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ConfigurationError("an in-memory SQLite database is lost at a restart: give a file, sqlite:///PATH")
    _private_file(url.database)
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 would commit around DDL, so we send BEGIN ourselves
        for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("everstep_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def application_name(name: str) -> str:
    """Return the application name of the controller's sessions; PostgreSQL truncates longer names."""
    return f"everstep-controller {name}".strip().encode("ascii", "replace").decode()[:63]


def _postgresql_engine(url: URL, most_idle_s: float, name: str) -> Engine:
    options = {
        "statement_timeout": STATEMENT_TIMEOUT_MS,
        "synchronous_commit": "on",
        "idle_in_transaction_session_timeout": round(most_idle_s * 1000),
    }
    return create_engine(
        url,
        pool_size=2,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": application_name(name),
            "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
            "tcp_user_timeout": STATEMENT_TIMEOUT_MS,
        },
    )


def engine_of(url: URL, *, most_idle_s: float = 0.0, name: str = "") -> Engine:
    """Return an engine. PostgreSQL ends sessions idle in a transaction for ``most_idle_s`` (0: no limit)."""
    return _sqlite_engine(url) if url.drivername == "sqlite" else _postgresql_engine(url, most_idle_s, name)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    value: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return value


def _refuse_unknown(revision: str | None, url: URL) -> None:
    if revision is not None and revision > HEAD:
        raise ConfigurationError(
            f"the database at {redacted_url(url)} has schema {revision}, this release knows up to {HEAD}: "
            "upgrade everstep, or restore a backup made by this release"
        )


def _migrate(engine: Engine, url: URL) -> None:
    with engine.connect() as plain:
        connection = plain.execution_options(**FOR_WRITING)
        with connection.begin(), _migrating:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            revision = _revision(connection)
            _refuse_unknown(revision, url)
            if revision != HEAD:
                upgrade(connection)


def _check_schema(engine: Engine, url: URL) -> None:
    with engine.connect() as connection:
        revision = _revision(connection)
    _refuse_unknown(revision, url)
    if revision != HEAD:
        raise ConfigurationError(
            f"the database at {redacted_url(url)} has schema {revision or 'none'}, this release needs {HEAD}: "
            "start once with --migrate"
        )


def open_database(database: str, *, migrate: bool = True, check: bool = False) -> Engine:
    """Return an engine for ``database`` (a URL) whose schema is current: ``migrate`` updates an old one.

    ``check`` reads a SQLite file first and refuses a damaged one; PostgreSQL checks its own pages if it uses checksums.
    Raises ConfigurationError if the URL is wrong, or the database is missing, inaccessible, newer or damaged.
    """
    url = parse_url(database)
    if check and url.drivername == "sqlite" and url.database:
        check_file(Path(url.database))
    engine = engine_of(url)
    try:
        if migrate:
            _migrate(engine, url)
        else:
            _check_schema(engine, url)
    except SQLAlchemyError as error:
        engine.dispose()
        raise ConfigurationError(diagnose(error, url)) from error
    except ConfigurationError:
        engine.dispose()
        raise
    return engine


def back_up(database: str, target: Path) -> int:
    """Back up a SQLite database to a new file, checked, without blocking writers. Return its size in bytes."""
    url = parse_url(database)
    if url.drivername != "sqlite" or not url.database:
        raise ConfigurationError("only SQLite databases can be backed up this way: use pg_dump for PostgreSQL")
    path = Path(url.database)
    if not path.is_file():
        raise ConfigurationError(f"there is no database at {path}")
    with _temporary_file(target) as draft:
        with _opened(path, "ro") as source:
            source.execute("VACUUM INTO ?", (str(draft),))
        with _opened(draft, "rw") as copy:
            (verdict,) = copy.execute("PRAGMA integrity_check").fetchone()
            if verdict != "ok":
                raise ConfigurationError(f"the database at {path} is damaged: {verdict}")
            copy.execute("UPDATE meta SET value = value + ? WHERE key = 'epoch'", (COPY_EPOCH_GAP,))
            copy.commit()
    return target.stat().st_size


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ConfigurationError(f"the database cannot be copied: {error}") from error


@contextlib.contextmanager
def _temporary_file(target: Path) -> Iterator[Path]:
    """Create an empty file beside ``target``, readable by its owner only; it becomes ``target`` once complete."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists():
            raise ConfigurationError(f"{target} already exists: give another name")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
