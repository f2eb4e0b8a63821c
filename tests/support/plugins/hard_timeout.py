"""End a test process whose test hangs in spite of its time-out.

pytest-timeout raises in the main thread, once for each test. It cannot end a test that waits in C code, catches the
exception, or hangs again in the teardown that follows. Such a test would block its worker until CI's limit, and CI
would not say which test it was.

Here a thread of :mod:`faulthandler`, which needs neither the GIL nor the main thread, prints the stacks of all threads
and ends the process. pytest-xdist then reports the test as crashed, and goes on in a new worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Generator, Iterator
from typing import TextIO

import pytest

ERRORS = pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "hard_timeout_after_s",
        "seconds after a test's own time-out, in each of its phases, at which its process ends",
        default="60",
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist and capturing replace the streams. The duplicate keeps the process's own standard error.
    config.stash[ERRORS] = os.fdopen(os.dup(2), "w", closefd=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[ERRORS].close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with bounded(item):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with bounded(item):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with bounded(item):
        yield


@contextlib.contextmanager
def bounded(item: pytest.Item) -> Iterator[None]:
    """End the process if the block takes longer than the test's time-out and ``hard_timeout_after_s`` together.

    Args:
        item: The test. A time-out of 0, with which people debug, sets no bound.
    """
    limit_s = timeout_of(item)
    if limit_s > 0:
        after_s = limit_s + float(item.config.getini("hard_timeout_after_s"))
        faulthandler.dump_traceback_later(after_s, file=item.config.stash[ERRORS], exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def timeout_of(item: pytest.Item) -> float:
    """Return the seconds that pytest-timeout gives a test: of its mark, the command line or the settings."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.args[0])
    option = item.config.getoption("timeout")
    return float(option if option is not None else item.config.getini("timeout"))
