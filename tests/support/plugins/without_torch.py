"""Skip tests that need torch if torch is not installed, since controller and agent run without it.

The plugin skips a test file whose imports need torch, and a test that has the mark ``torch`` or gets processes with
torch from a fixture. import-linter checks that the agent imports no torch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.util import find_spec

import pytest

FIXTURES = {"alone", "forks", "kept_ranks", "session_forks"}
NEEDS_TORCH = "needs torch, which is not installed"
ABSENT = find_spec("torch") is None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_torch(error: BaseException | None) -> bool:
    """Tell whether an error comes from an import of torch."""
    return any(isinstance(cause, ModuleNotFoundError) and cause.name == "torch" for cause in causes(error))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = report.call
    if ABSENT and call is not None and call.excinfo is not None and lacks_torch(call.excinfo.value):
        skipped = (str(collector.path), 0, f"Skipped: {NEEDS_TORCH}")
        return pytest.CollectReport(collector.nodeid, "skipped", skipped, None)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if ABSENT else ():
        if item.get_closest_marker("torch") or FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason=NEEDS_TORCH))
