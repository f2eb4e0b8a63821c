"""JSON schemas of names and numbers, as every supported Python exports them."""

from __future__ import annotations

from everstep.ids import portable_json_schema


def test_whole_bounds_are_integers() -> None:
    """``Annotated[float, Meta(ge=0)]`` and ``Meta(ge=0.0)`` are equal, so ``typing`` may answer one for the other."""
    found = portable_json_schema({"items": [{"type": "number", "minimum": 0.0, "maximum": 0.5, "default": 30.0}]})
    assert repr(found) == "{'items': [{'type': 'number', 'minimum': 0, 'maximum': 0.5, 'default': 30.0}]}"
