"""Fixtures of the agent's supervisor."""

from __future__ import annotations

import pytest

from tests.support.local_node import Node


@pytest.fixture
def node() -> Node:
    """A node that nobody is connected to yet."""
    return Node()
