"""Cursors of lists: the place of the last entry that was given, opaque to clients and checked when it comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from everstep.errors import MalformedMessage

_BETWEEN = "~"


def cursor_at(place: Iterable[Any]) -> str:
    """The cursor of the page after this place."""
    return _BETWEEN.join(repr(part) if isinstance(part, float) else str(part) for part in place)


def place_of(cursor: str, kinds: Sequence[type]) -> tuple[Any, ...] | None:
    """The values in a cursor; None in the empty one. Raises MalformedMessage for one that nobody was given."""
    if not cursor:
        return None
    parts = cursor.split(_BETWEEN)
    try:
        if len(parts) != len(kinds):
            raise ValueError(cursor)
        place = tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
        if not all(_is_storable(part) for part in place):
            raise ValueError(cursor)
        return place
    except ValueError:
        raise MalformedMessage(f"{cursor[:100]!r} is no cursor: give what `next` said of the page before") from None


def _is_storable(part: Any) -> bool:
    """Whether a database can compare it: integers have 64 bits there, and nothing comes after NaN."""
    if isinstance(part, float):
        return math.isfinite(part)
    return not isinstance(part, int) or -(1 << 63) <= part < 1 << 63
