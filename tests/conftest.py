"""Fixtures that several parts' tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import ForkPool, fork_pool
from trainer_hooks.launch.preload import MODULES


@pytest.fixture(scope="session")
def session_forks() -> Iterator[ForkPool]:
    """One fork server with torch and a vault imported for the whole session."""
    with fork_pool((*MODULES, "agent.vault.main")) as pool:
        yield pool


@pytest.fixture
def forks(session_forks: ForkPool) -> Iterator[ForkPool]:
    """Processes with torch imported, in milliseconds (tests/support/forked.py); killed at the end of the test."""
    yield session_forks
    session_forks.release()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """As tmp_path, for what keeps unix sockets: their paths end at 107 bytes, and tmp_path has the names of the user,
    of pytest's worker and of the test in it."""
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        yield Path(name)
