"""How often something was done lately, to one node and in the fleet, and whether that is enough."""

from __future__ import annotations

from collections.abc import Sequence


def noted(times: Sequence[float], now: float, window_s: float) -> list[float]:
    """``times`` within the window, and now."""
    return [*_within(times, now, window_s), now]


def node_cap(times: Sequence[float], now: float, window_s: float, most: int, what: str) -> str:
    """Why it is not done once more, in words; empty while it may be. ``what``: what happened to the node."""
    count = len(_within(times, now, window_s))
    return "" if count < most else f"{what} {count} times within {window_s / 86400:g} days"


def next_at(times: Sequence[float], now: float, window_s: float, most: int) -> tuple[int, float]:
    """How often it was done in the fleet, and when it may be again; (0, 0.0) while it may be now."""
    recent = _within(times, now, window_s)
    return (0, 0.0) if len(recent) < most else (len(recent), recent[-most] + window_s)


def _within(times: Sequence[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if at > now - window_s]
