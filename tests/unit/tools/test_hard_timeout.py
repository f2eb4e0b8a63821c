"""A test that ignores its time-out ends with its process, is named, and holds up no other test."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytest_plugins = ["pytester"]

TESTS = """
import signal, time
import pytest

@pytest.fixture
def stuck():
    yield
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as if the main thread waited in C code
    time.sleep(1000)

def test_before(): ...

def test_fails_and_hangs_in_teardown(stuck):
    raise AssertionError

def test_after(): ...
"""


@pytest.mark.slow
def test_stuck_teardown_is_reported_and_others_run(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntimeout = 1\nhard_timeout_after_s = 0.5\n")
    pytester.makeconftest("from tests.support.plugins.hard_timeout import *\n")
    pytester.makepyfile(TESTS)
    pytester.syspathinsert(ROOT)
    ended = pytester.runpytest_subprocess("--numprocesses", "1", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    ended.stdout.fnmatch_lines(["*worker 'gw0' crashed while running '*::test_fails_and_hangs_in_teardown'*"])
    ended.stderr.fnmatch_lines(["*in stuck"])
    ended.assert_outcomes(passed=2, failed=2)
