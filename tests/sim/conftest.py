from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Worlds fail by the hundred; what their programs log about it is for nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
