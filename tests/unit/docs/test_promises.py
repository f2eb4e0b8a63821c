"""Each promise that the guarantees page lists has a test that is marked with it, and each marked promise is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.plugins.promises import promises_marked_in

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "concepts" / "guarantees.md"
LISTED = re.compile(r"^\W*`([a-z][a-z0-9-]*)`", re.MULTILINE)
"""An identifier in backticks at the start of a heading, a list item, a row of a table or a paragraph."""
NAMED = re.compile(r"`([a-z][a-z0-9-]*)`")

pytest_plugins = ["pytester"]


@pytest.mark.skipif(not PAGE.exists(), reason="docs/concepts/guarantees.md is not written yet")
def test_promises_and_marked_tests_agree() -> None:
    page = PAGE.read_text(encoding="utf-8")
    marked: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        marked |= promises_marked_in(text) if "promise(" in text else set()
    listed = set(LISTED.findall(page))
    assert listed, "the page lists no promise"
    assert not listed - marked, f"no test is marked with {sorted(listed - marked)}"
    assert not marked - set(NAMED.findall(page)), f"the page lacks {sorted(marked - set(NAMED.findall(page)))}"


def test_promises_option_lists_promises_and_runs_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = promise: ids\n")
    pytester.makeconftest("from tests.support.plugins.promises import *\n")
    pytester.makepyfile(
        test_both="""
        import pytest

        @pytest.mark.promise("late", "early")
        @pytest.mark.parametrize("n", [1, 2])
        def test_both(n):
            assert False

        @pytest.mark.promise("early")
        def test_one():
            assert False

        def test_none():
            assert False
        """
    )
    pytester.syspathinsert(ROOT)
    result = pytester.runpytest_inprocess("--promises", "-p", "no:cacheprovider")
    assert result.ret == 0
    begin = result.outlines.index("early")
    assert result.outlines[begin : begin + 5] == [
        "early",
        "    test_both.py::test_both",
        "    test_both.py::test_one",
        "late",
        "    test_both.py::test_both",
    ]
