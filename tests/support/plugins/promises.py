"""List the promises of ``docs/concepts/guarantees.md`` with the tests that hold them: ``pytest --promises``.

A test names the promises that it holds by ``@pytest.mark.promise("no-sample-lost")``, several with a comma.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", action="store_true", help="list promises with their tests, and run nothing")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("promises"):
        config.pluginmanager.register(PromiseLister(), "promise-lister")


class PromiseLister:
    """Print the promises of the collected tests instead of running the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        terminal = session.config.get_terminal_writer()
        for promise, tests in sorted(tests_of_promises(session.items).items()):
            terminal.line(promise)
            for test in tests:
                terminal.line(f"    {test}")
        return True


def tests_of_promises(items: Iterable[pytest.Item]) -> dict[str, list[str]]:
    """Return the node ids of the tests of each promise, in the order of collection, without parameters."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for item in items:
        for mark in item.iter_markers("promise"):
            for promise in mark.args:
                found[promise][item.nodeid.partition("[")[0]] = None
    return {promise: list(tests) for promise, tests in found.items()}


def promises_marked_in(source: str) -> set[str]:
    """Return the promises that ``pytest.mark.promise`` names in the source of a test file."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "promise"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
