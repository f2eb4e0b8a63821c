"""Export the messages' JSON Schemas: ``python -m everstep.wire.export`` (``make schema``)."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from everstep.ids import portable_json_schema
from everstep.wire import v1
from everstep.wire.v1.base import Message

SCHEMA_DIRECTORY = Path(__file__).parent / "schema"
MODULES: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f"{v1.__name__}.{each.name}")
    for each in pkgutil.iter_modules(v1.__path__)
    if each.name != "base"
)


def module_schema(module: ModuleType) -> dict[str, Any]:
    """Return one document with every message of the module, and all referenced types, under ``$defs``."""
    classes = (kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__)
    messages = [kind for kind in classes if issubclass(kind, Message) and not kind.__name__.startswith("_")]
    _, components = msgspec.json.schema_components(messages, ref_template="#/$defs/{name}")
    name = module.__name__.removeprefix("everstep.wire.")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": (module.__doc__ or "").strip().splitlines()[0],
        "$defs": portable_json_schema(dict(sorted(components.items()))),
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
