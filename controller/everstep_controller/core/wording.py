"""Word lists of names and counts, and keep them short."""

from __future__ import annotations

from collections.abc import Collection, Sequence

MAX_NAMES = 8
"""Number of names in a sentence; further ones are counted."""


def join_names(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """Return ``a, b, c``, or ``a, b, c and 37 more``; ``none`` for an empty list."""
    if len(names) <= limit:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def ranks_named(ranks: Collection[int]) -> str:
    """Return ``rank 1``, ``ranks 0 and 2``, ``ranks 0, 2 and 3``, or ``ranks 0, 1, ... and 37 more``."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > MAX_NAMES:
        return f"ranks {join_names(words)}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def rank_ranges(ranks: Collection[int]) -> str:
    """Return ``rank 1``, ``ranks 1-3``, ``ranks 0, 2-5``, or ``ranks 0, 2, ... and 37 more``."""
    ordered, runs = sorted(ranks), list[tuple[int, int]]()
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    if len(runs) > MAX_NAMES:
        return ranks_named(ranks)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(words)}"


def format_duration(seconds: float) -> str:
    """Return whole seconds, or minutes from two on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def format_node_count(count: int) -> str:
    """Return ``1 node`` or ``2 nodes``."""
    return "1 node" if count == 1 else f"{count} nodes"


def format_span(seconds: float) -> str:
    """Return ``7 days``, or seconds for spans of no whole number of days."""
    days, rest = divmod(seconds, 86400.0)
    if days >= 1 and not rest:
        return "1 day" if days == 1 else f"{days:.0f} days"
    return f"{seconds:g} s"
