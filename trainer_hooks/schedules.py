"""Schedules keep a list with an entry for each of their optimizer's groups, by its place.

A rank with other layers may have other groups, or fewer: a stage of a pipeline without biases has none for them. So the
entries are taken where the parameters of a group stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PER_GROUP = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas"})
"""In torch's ``state_dict()`` of them."""

Place = tuple[int, int]
"""Which of several stored states, and which of its groups."""


def regrouped(states: Sequence[Any], places: Sequence[Place]) -> Any:
    """The first of these states of one schedule, with entries for groups that stood at ``places``."""
    first = states[0]
    if isinstance(first, dict):
        return {key: _entry(key, [of[key] for of in states if key in of], places, len(states)) for key in first}
    if isinstance(first, list) and all(isinstance(of, list) and len(of) == len(first) for of in states):
        return [regrouped(of, places) for of in zip(*states, strict=True)]  # schedules in a schedule
    return first


def _entry(key: Any, values: Sequence[Any], places: Sequence[Place], count: int) -> Any:
    if len(values) < count:
        return values[0]
    if key not in PER_GROUP:
        return regrouped(values, places)
    if all(isinstance(values[of], list) and at < len(values[of]) for of, at in places):
        return [values[of][at] for of, at in places]
    return values[0]
