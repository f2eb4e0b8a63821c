"""Numbers of examples of property tests, few in every run and many in nightly tests."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("EVERSTEP_EXAMPLES", "1"))
"""``make test-nightly`` sets 20."""


def examples(count: int) -> int:
    """Return the number of examples of a property that has ``count`` in every run."""
    return count * FACTOR
