"""Words that stay short, however many nodes they are about."""

from __future__ import annotations

from collections.abc import Sequence

NAMED_AT_MOST = 8
"""Names in a sentence; of more, the rest is counted."""


def named(names: Sequence[str], most: int = NAMED_AT_MOST) -> str:
    """``a, b, c``, or ``a, b, c and 37 more``; ``none`` of nothing."""
    if len(names) <= most:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def nodes(count: int) -> str:
    """``1 node``, ``2 nodes``."""
    return "1 node" if count == 1 else f"{count} nodes"
