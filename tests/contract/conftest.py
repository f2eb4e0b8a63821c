"""Names of the tests that schemathesis makes."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """pytest 9.2 calls what schemathesis makes of a description all by one name, without the route."""
    route = getattr(item, "operation_label", None)
    if route is not None and route not in item.nodeid:
        item._id = item.id.with_params(route)
