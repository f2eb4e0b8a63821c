"""Fixtures that several parts' tests share."""

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

from tests.support import programs
from tests.support.examples import FACTOR, examples
from tests.support.forked import ForkPool, fork_pool, torch_forks
from tests.support.kept_ranks import KeptRanks

# No bound on wall time; and no tracing of each line of what fails: shrinking takes minutes with it before Python 3.12
settings.register_profile(
    "everstep",
    deadline=None,
    max_examples=examples(40),
    derandomize=FACTOR == 1,  # the same examples in every suite, others every night
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("everstep")

pytest_plugins = ["tests.support.promises", "tests.support.workers"]

PROCESS_FIXTURES = {"forks", "session_forks", "program_forks", "postgres", "own_postgres", "real_slurm"}
SERVER_VARIANTS = {"postgresql", "slurm"}
"""Values of parameters by which a test gets one of these servers."""

LONGEST_TEMPORARY = 24
"""Bytes of the path of the directory for temporary files: sockets are made some way below, and have 107 for theirs."""


def pytest_configure(config: pytest.Config) -> None:
    """What a shell starts in the background ignores Ctrl-C, and so does all that it starts; some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Images of containers set this; each of the hundreds of processes that tests start would compile everything anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # As launchers set it for ranks. Two processes whose torch computes in two threads each wait for one another.
    os.environ["OMP_NUM_THREADS"] = "1"
    own_temporary_directory()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported meanwhile is there to stay: nobody looks for garbage among it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def own_temporary_directory() -> None:
    """Gives the session, its workers and all that they start a directory for temporary files that is gone at the end:
    processes that tests kill leave theirs behind. ``tmp_path`` stays where it was, kept for who looks at a failure."""
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    own = tempfile.mkdtemp(prefix="ev-", dir=usual if len(os.fsencode(usual)) <= LONGEST_TEMPORARY else "/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = own
    os.environ["XDG_STATE_HOME"] = os.path.join(own, "state")  # launchers keep folders there for their jobs
    # At the interpreter's end, after multiprocessing has removed its own directory in there (at -100).
    Finalize(None, shutil.rmtree, (own,), {"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse two tests of one name. Mark tests that start processes as slow. Where workers share the files, put those
    with slow tests first, so that no worker begins a long file while the others have nothing left to do."""
    twice = [name for name, times in Counter(item.nodeid for item in items).items() if times > 1]
    if twice:
        raise pytest.UsageError(f"tests must have names of their own: {', '.join(twice)}")
    for item in items:
        if starts_processes(item):
            item.add_marker("slow")
        if absent := [name for mark in item.iter_markers("frameworks") for name in mark.args if not find_spec(name)]:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(absent)}"))
    if config.getoption("workers"):
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
    """Processes with torch imported, in milliseconds (tests/support/forked.py); killed at the end of the test."""
    yield session_forks
    session_forks.release()


@pytest.fixture(scope="module")
def kept_ranks(session_forks: ForkPool) -> Iterator[KeptRanks]:
    """Ranks for all tests of a module, which must not use ``forks`` besides: it kills all that was forked."""
    ranks = KeptRanks(session_forks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def program_forks() -> Iterator[ForkPool]:
    """One fork server with the controller and the vault imported, without torch, for the whole session. Who forks a
    program from it ends it: those of a module's fixture outlive the test."""
    with fork_pool(programs.MODULES) as pool:
        yield pool


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    import torch.distributed as dist  # most workers need no torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """As tmp_path, for what keeps unix sockets: their paths end at 107 bytes, and tmp_path has the names of the user,
    of pytest's worker and of the test in it."""
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        yield Path(name)
