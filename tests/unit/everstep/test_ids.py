"""Names match whole texts, so that a trailing newline imitates no other name; schemas are equal on each Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from everstep.ids import Address, JobId, NodeId, check_name, portable_json_schema
from everstep.wire import export
from everstep.wire.v1.enrolment import Enrol, PersonName
from everstep_controller.api.routes import PATH_PARAMETERS, QUERY_PARAMETERS
from everstep_controller.auth.peers import identity_of

HASH = "ab" * 32


@pytest.mark.parametrize("kind", [NodeId, JobId, PersonName])
def test_name_with_trailing_newline_is_refused(kind: Any) -> None:
    assert msgspec.convert("n1", kind) == "n1"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert("n1\n", kind)


def test_address_with_trailing_newline_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert("n1:7000\n", Address)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(Enrol(node="rack3-n07\n", secret_hash=HASH)), type=Enrol)
    with pytest.raises(ValueError, match="cannot name a node"):
        check_name("n1\n", "node")


def _patterns(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "pattern" and isinstance(value, str):
                yield value
            else:
                yield from _patterns(value)
    elif isinstance(part, list):
        for item in part:
            yield from _patterns(item)


def test_patterns_do_not_match_a_trailing_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "portable_json_schema", lambda part: part)
    kinds = [msgspec.json.schema(kind) for kind in (*PATH_PARAMETERS.values(), *QUERY_PARAMETERS.values())]
    found = set(_patterns([export.module_schema(module) for module in export.MODULES] + kinds))
    assert any(pattern.endswith("\\Z") for pattern in found)
    free = {r"^(0|[1-9][0-9]{0,5})$", r"^[^=]+(=|$)"}  # of a schema alone; of a label's value, which is any text
    assert not {pattern for pattern in found if pattern.endswith(("$", "$)"))} - free


@pytest.mark.parametrize("name", ["n1%0a", "olga%00", "olga%0d%0aroot", "%1b[2J"])
def test_certificate_with_unprintable_name_is_refused(name: str) -> None:
    ends = {"notAfter": "Jan  1 00:00:00 2030 GMT"}
    assert identity_of({"subjectAltName": (("URI", "everstep://operator/olga"),), **ends}) is not None
    assert identity_of({"subjectAltName": (("URI", f"everstep://operator/{name}"),), **ends}) is None


def test_whole_bounds_are_integers() -> None:
    """``Annotated[float, Meta(ge=0)]`` and ``Meta(ge=0.0)`` are equal, so ``typing`` may answer one for the other."""
    found = portable_json_schema({"items": [{"type": "number", "minimum": 0.0, "maximum": 0.5, "default": 30.0}]})
    assert repr(found) == "{'items': [{'type': 'number', 'minimum': 0, 'maximum': 0.5, 'default': 30.0}]}"
