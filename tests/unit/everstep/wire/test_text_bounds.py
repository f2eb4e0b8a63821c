"""Every text that a client can send has a bound, which is checked where the message is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from everstep_controller.api.routes import ROUTES
from msgspec import inspect

from everstep.wire.v1 import agent, enrolment, local, transfer

CLIENT_MESSAGES: list[Any] = [
    agent.Register,
    agent.Heartbeat,
    agent.Reports,
    agent.Acknowledge,
    enrolment.Enrol,
    local.ToAgent,
    local.ToVault,
    transfer.Opening,
    transfer.TransferRequest,
    *{route.body for route in ROUTES.values() if route.body is not None},
]

READ_AGAIN = {"PolicyChange.rules values"}
"""Rules are decoded a second time, by their kind."""


def unbounded_texts(kind: Any) -> Iterator[str]:
    """Yield the places of all texts in a message that may have any length."""
    seen: set[Any] = set()

    def walk(part: Any, place: str) -> Iterator[str]:
        match part:
            case inspect.StrType(max_length=None, pattern=None):
                yield place
            case inspect.StructType(cls=cls, fields=fields) if cls not in seen:
                seen.add(cls)
                for field in fields:
                    yield from walk(field.type, f"{cls.__name__}.{field.name}")
            case inspect.UnionType(types=types):
                for one in types:
                    yield from walk(one, place)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                yield from walk(item, place)
            case inspect.TupleType(item_types=items):
                for one in items:
                    yield from walk(one, place)
            case inspect.DictType(key_type=key, value_type=value):
                yield from walk(key, f"{place} keys")
                yield from walk(value, f"{place} values")
            case inspect.Metadata(type=inner):
                yield from walk(inner, place)
            case inspect.AnyType() | inspect.RawType():
                yield place

    yield from walk(inspect.type_info(kind), str(kind))


@pytest.mark.parametrize("kind", CLIENT_MESSAGES, ids=lambda kind: getattr(kind, "__name__", str(kind)[:40]))
def test_texts_of_clients_have_bounds(kind: Any) -> None:
    assert set(unbounded_texts(kind)) <= READ_AGAIN
