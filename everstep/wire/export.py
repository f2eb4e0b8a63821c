"""Writes the messages' JSON Schemas: ``python -m everstep.wire.export`` (``make schema``)."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from everstep.ids import in_schema
from everstep.wire.v1 import (
    agent,
    directives,
    enrolment,
    evidence,
    kept,
    local,
    operator,
    parity,
    session,
    supervision,
    training,
    transfer,
    vault_reports,
)
from everstep.wire.v1.base import Message

SCHEMA_DIRECTORY = Path(__file__).parent / "schema"
MODULES: tuple[ModuleType, ...] = (
    agent,
    directives,
    enrolment,
    evidence,
    kept,
    local,
    operator,
    parity,
    session,
    training,
    transfer,
    vault_reports,
)
PARTS: dict[ModuleType, tuple[ModuleType, ...]] = {local: (supervision,)}
"""Modules whose messages are in another one's document: they go over the same socket."""


def _messages(module: ModuleType) -> list[type[Message]]:
    """The messages that the module and its parts define, by name."""
    found = [
        kind
        for part in (module, *PARTS.get(module, ()))
        for kind in vars(part).values()
        if inspect.isclass(kind) and issubclass(kind, Message) and kind.__module__ == part.__name__
    ]
    return sorted(found, key=lambda kind: kind.__name__)


def schema(module: ModuleType) -> dict[str, Any]:
    """One document: every message of the module and its parts under ``$defs``, with whatever those refer to."""
    _, components = msgspec.json.schema_components(_messages(module), ref_template="#/$defs/{name}")
    name = module.__name__.removeprefix("everstep.wire.")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": (module.__doc__ or "").strip().splitlines()[0],
        "$defs": in_schema(dict(sorted(components.items()))),
    }


def text(module: ModuleType) -> str:
    """The document as it is checked in."""
    return json.dumps(schema(module), indent=2, ensure_ascii=False) + "\n"


def path(module: ModuleType) -> Path:
    """Where the module's document is checked in."""
    return SCHEMA_DIRECTORY / (module.__name__.removeprefix("everstep.wire.") + ".json")


def main() -> None:
    """Writes all of them."""
    SCHEMA_DIRECTORY.mkdir(exist_ok=True)
    for module in MODULES:
        path(module).write_text(text(module))
        print(path(module))


if __name__ == "__main__":
    main()
