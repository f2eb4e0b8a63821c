"""How many examples a property is tried with: few in every suite, many at night."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("EVERSTEP_EXAMPLES", "1"))
"""``make test-nightly`` sets 20."""


def examples(count: int) -> int:
    """Return the number of examples of a property that every suite tries with ``count``."""
    return count * FACTOR
