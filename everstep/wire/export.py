"""Export the messages' JSON Schemas: ``python -m everstep.wire.export`` (``make schema``)."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from everstep.ids import with_portable_patterns
from everstep.wire.v1 import (
    agent,
    directives,
    enrolment,
    local,
    operator,
    operator_history,
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
    local,
    operator,
    operator_history,
    training,
    transfer,
    vault_reports,
)


def _messages(module: ModuleType) -> list[type[Message]]:
    """Return the messages that the module defines, by name."""
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Message) and kind.__module__ == module.__name__
    ]
    return sorted(found, key=lambda kind: kind.__name__)


def module_schema(module: ModuleType) -> dict[str, Any]:
    """Return one document with every message of the module, and all referenced types, under ``$defs``."""
    _, components = msgspec.json.schema_components(_messages(module), ref_template="#/$defs/{name}")
    name = module.__name__.removeprefix("everstep.wire.")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": (module.__doc__ or "").strip().splitlines()[0],
        "$defs": with_portable_patterns(dict(sorted(components.items()))),
    }


def schema_text(module: ModuleType) -> str:
    """Return the document as it is checked in."""
    return json.dumps(module_schema(module), indent=2, ensure_ascii=False) + "\n"


def schema_path(module: ModuleType) -> Path:
    """Return the path of the module's checked-in document."""
    return SCHEMA_DIRECTORY / (module.__name__.removeprefix("everstep.wire.") + ".json")


def main() -> None:
    """Write all documents."""
    SCHEMA_DIRECTORY.mkdir(exist_ok=True)
    for module in MODULES:
        schema_path(module).write_text(schema_text(module))
        print(schema_path(module))


if __name__ == "__main__":
    main()
