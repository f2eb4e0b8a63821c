"""Fixtures of the controller's shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep_controller.store.database import open_database
from everstep_controller.store.writer import DatabaseWriter
from sqlalchemy import Engine

from tests.support.postgres import postgres, postgres_server

__all__ = ["database", "postgres", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, of each supported kind in turn."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'controller.db'}"
    else:
        yield request.getfixturevalue("postgres")


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """That database, with the newest schema."""
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
