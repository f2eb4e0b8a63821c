"""Fixtures of vaults."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import Vaults, vaults


@pytest.fixture
def fleet(program_forks: ForkPool) -> Iterator[Vaults]:
    """Vaults to be started, each a process."""
    with vaults(program_forks) as running:
        yield running


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in shared memory."""
    made = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)
