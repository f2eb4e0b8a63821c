"""Fixtures that several test packages share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.support.plugins.example_counts import FACTOR, examples
from tests.support.processes import forked_programs
from tests.support.processes.fork_pool import ForkPool, fork_pool, torch_forks
from tests.support.ranks.kept_ranks import KeptRanks

# No deadline, and no explain phase: before Python 3.12 it traces each line, and shrinking takes minutes.
settings.register_profile(
    "everstep",
    deadline=None,
    max_examples=examples(40),
    derandomize=FACTOR == 1,  # the same examples in every run of the suite, others every night
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("everstep")

pytest_plugins = [
    "tests.support.plugins.hard_timeout",
    "tests.support.plugins.promises",
    "tests.support.plugins.without_torch",
]

PROCESS_FIXTURES = {"forks", "session_forks", "program_forks", "postgres", "own_postgres", "real_slurm"}
SERVER_VARIANTS = {"postgresql", "slurm"}
"""Parameter values with which a test gets one of these servers."""

LONGEST_TEMPORARY = 24
"""Bytes of the temporary directory's path: a unix socket below it may have a path of 107 bytes."""

SHARED_MEMORY = "/dev/shm"
NEEDED_MEMORY = 4 << 30
"""Free bytes of shared memory from which on temporary files are kept there; a run needs a tenth of them."""


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C work in a shell's background job, which inherits an ignored SIGINT; some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Container images set this variable; each of the hundreds of test processes would then compile every module.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # As launchers do for ranks. Two processes with two torch threads each would wait for one another.
    os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit it
        own_temporary_directory()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules from garbage collection, as they stay for the whole session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def own_temporary_directory() -> None:
    """Give the session and its processes a temporary directory of their own, which is removed at the end.

    Processes that tests kill leave files behind. ``tmp_path`` stays elsewhere, for a look at failed tests. Both are in
    memory if there is enough: tests make thousands of small files and databases.
    """
    usual = tempfile.gettempdir()
    if os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free >= NEEDED_MEMORY:
        usual = SHARED_MEMORY
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    own = tempfile.mkdtemp(prefix="ev-", dir=usual if len(os.fsencode(usual)) <= LONGEST_TEMPORARY else "/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = own
    os.environ["XDG_STATE_HOME"] = os.path.join(own, "state")  # launchers keep folders there for their jobs
    # At the interpreter's exit, after multiprocessing has removed its own directory in it (priority -100).
    Finalize(None, shutil.rmtree, (own,), {"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse duplicate test names, mark tests that start processes as slow, and sort files for several workers.

    Files with slow tests come first, so that no worker starts a long file while the others are idle.
    """
    twice = [name for name, times in Counter(item.nodeid for item in items).items() if times > 1]
    if twice:
        raise pytest.UsageError(f"test names must be unique: {', '.join(twice)}")
    for item in items:
        if starts_processes(item):
            item.add_marker("slow")
        if absent := [name for mark in item.iter_markers("frameworks") for name in mark.args if not find_spec(name)]:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(absent)}"))
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def starts_processes(item: pytest.Item) -> bool:
    """Tell whether a test gets processes or a real server from a fixture. Such a test counts as slow."""
    variants = getattr(item, "callspec", None)
    values = {value for value in variants.params.values() if isinstance(value, str)} if variants is not None else set()
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(values & SERVER_VARIANTS or fixtures & PROCESS_FIXTURES)


@pytest.fixture(scope="session")
def session_forks() -> ForkPool:
    """One fork server with torch and a vault imported for the whole session."""
    return torch_forks()


@pytest.fixture
def forks(session_forks: ForkPool) -> Iterator[ForkPool]:
    """Fork processes with torch imported, in milliseconds, and kill them after the test."""
    yield session_forks
    session_forks.release()


@pytest.fixture(scope="module")
def kept_ranks(session_forks: ForkPool) -> Iterator[KeptRanks]:
    """Ranks for all tests of a module, which must not also use ``forks``: that fixture kills all forked processes."""
    ranks = KeptRanks(session_forks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def program_forks() -> Iterator[ForkPool]:
    """One fork server for the whole session, with the controller and the vault imported, and without torch.

    A test ends the programs that it forks; those of a module's fixture outlive the test.
    """
    with fork_pool(forked_programs.MODULES) as pool:
        yield pool


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    import torch.distributed as dist  # most workers need no torch
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Like tmp_path, but short: a unix socket's path is limited to 107 bytes.

    tmp_path contains the names of the user, of the pytest worker and of the test.
    """
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        yield Path(name)
