"""End a test process whose test hangs in spite of its time-out.

pytest-timeout raises in the main thread, once for each test. It cannot end a test that waits in C code, catches the
exception, or hangs again in the teardown that follows. Such a test would block its worker until CI's limit, and CI
would not say which test it was.

Here a thread of :mod:`faulthandler`, which needs neither the GIL nor the main thread, prints the stacks of all threads
and ends the process. pytest-xdist then reports the test as crashed, and goes on in a new worker.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TextIO

import pytest

ERRORS = pytest.StashKey[TextIO]()


@dataclass(frozen=True)
class Bound:
    """The running bound: the time-out that it is for, 0 for none, and the moment from which on it counts."""

    limit_s: float = 0.0
    since: float = 0.0


BOUND = pytest.StashKey[Bound]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "hard_timeout_after_s",
        "seconds after a test's own time-out at which its process ends",
        default="60",
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist and capturing replace the streams. The duplicate keeps the process's own standard error.
    config.stash[ERRORS] = os.fdopen(os.dup(2), "w", closefd=True)
    config.stash[BOUND] = Bound()


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    config.stash[ERRORS].close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process if the test takes longer than its time-out and ``hard_timeout_after_s`` together.

    A time-out of 0, with which people debug, sets no bound. Each bound is a thread, and its end takes as long as a
    small test: tests that follow soon share one.
    """
    bound = item.config.stash[BOUND]
    limit_s = timeout_of(item)
    if bound.limit_s != limit_s or time.perf_counter() - bound.since > limit_s / 20:
        set_bound(item)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set the bound again: pytest's own plugin for faulthandler has just cancelled it."""
    if isinstance(node, pytest.Item):
        set_bound(node)


def set_bound(item: pytest.Item) -> None:
    """Set the bound of a test and of those that follow within a twentieth of its time-out."""
    limit_s = timeout_of(item)
    if limit_s > 0:
        after_s = limit_s * 21 / 20 + float(item.config.getini("hard_timeout_after_s"))
        faulthandler.dump_traceback_later(after_s, file=item.config.stash[ERRORS], exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()
    item.config.stash[BOUND] = Bound(limit_s, time.perf_counter())


def timeout_of(item: pytest.Item) -> float:
    """Return the seconds that pytest-timeout gives a test: of its mark, the command line or the settings."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.args[0])
    option = item.config.getoption("timeout")
    return float(option if option is not None else item.config.getini("timeout"))
