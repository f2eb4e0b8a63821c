"""Fixtures of the agent's supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.controller_stub import ControllerStub, serving
from tests.support.local_node import Node
from tests.support.uplinks import TOKEN, Bench


@pytest.fixture
def node() -> Node:
    """A node that nobody is connected to yet."""
    return Node()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """What uplinks are made of."""
    return Bench(tmp_path)


@pytest.fixture
def controller() -> Iterator[ControllerStub]:
    """A stub in a thread that speaks the wire messages."""
    with serving(ControllerStub(TOKEN)) as stub:
        yield stub
