"""Fixtures of the controller's shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from everstep_controller.store.database import open_database
from everstep_controller.store.writer import DatabaseWriter
from tests.support.services.postgres import postgres, postgres_server, postgres_template, postgres_with_schema
from tests.support.services.sqlite import create_with_schema

__all__ = ["database", "postgres", "postgres_server", "postgres_template", "postgres_with_schema"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database of each supported kind in turn: with the newest schema for a test that asks for ``engine``,
    and empty for others."""
    migrated = "engine" in request.fixturenames
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'controller.db'}"
        if migrated:
            create_with_schema(url)
        yield url
    else:
        yield request.getfixturevalue("postgres_with_schema" if migrated else "postgres")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """The database with the newest schema."""
    engine = open_database(database)
    yield engine
    engine.dispose()


@pytest.fixture
def writer(engine: Engine) -> Iterator[DatabaseWriter]:
    """Of the controller that leads."""
    writer = DatabaseWriter(engine)
    writer.take_over()
    yield writer
    writer.close()
