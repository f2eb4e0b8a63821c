"""Fixtures that several parts' tests share."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.forked import ForkPool, fork_pool
from trainer_hooks.launch.preload import MODULES


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so does all that it starts; some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def program_forks() -> Iterator[ForkPool]:
    """One fork server with the controller and the vault imported, without torch, for the whole session. Who forks a
    program from it ends it: those of a module's fixture outlive the test."""
    with fork_pool(programs.MODULES) as pool:
        yield pool


@pytest.fixture
def short_path() -> Iterator[Path]:
    """As tmp_path, for what keeps unix sockets: their paths end at 107 bytes, and tmp_path has the names of the user,
    of pytest's worker and of the test in it."""
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        yield Path(name)
