from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Disable logging, since the programs of simulated worlds log hundreds of expected failures."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
