"""Pages of the REST API: every route and every model, from the controller's OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

from everstep_controller.api.openapi import document
from tools.docs_site.markdown import code, from_docstring, table

_MODELS = "rest-models.md"
_PREFIX = "#/components/schemas/"


def routes_page() -> str:
    """Return the page of all routes."""
    api = document()
    routes = [
        (path, method, operation) for path, methods in api["paths"].items() for method, operation in methods.items()
    ]
    parts = [
        "# REST routes\n\nThe controller serves this description as `GET /openapi.json`. Examples of every route "
        "begin at [REST conventions](rest-examples-basics.md); the [models](rest-models.md) have their own page.\n",
        table(
            ("Method", "Path", "Purpose", "Token"),
            [
                (method.upper(), f"[`{path}`](#{_anchor(method, path)})", route["summary"], _token(route))
                for path, method, route in routes
            ],
        ),
    ]
    parts += [_route(path, method, route) for path, method, route in routes]
    return "\n".join(parts)


def _anchor(method: str, path: str) -> str:
    kept = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in path.strip("/"))
    return f"{method.lower()}-{kept}".rstrip("-")


def _token(operation: dict[str, Any]) -> str:
    said = operation["description"].split(".")[0]
    return said.removeprefix("Token of: ")


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"## {method.upper()} `{path}` {{ #{_anchor(method, path)} }}\n"]
    parts.append(f"{operation['summary']} {operation['description']}\n")
    parameters = [
        (code(parameter["name"]), parameter["in"], "yes" if parameter["required"] else "", type_of(parameter["schema"]))
        for parameter in operation["parameters"]
    ]
    if parameters:
        parts.append(table(("Parameter", "In", "Required", "Type"), parameters))
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        parts.append(f"Body: {type_of(content['schema'])}\n")
    answers = []
    for status, answer in operation["responses"].items():
        kinds = [f"{media}: {type_of(body['schema'])}" for media, body in answer.get("content", {}).items()]
        answers.append((status, answer["description"], ", ".join(kinds)))
    parts.append(table(("Status", "Meaning", "Content"), answers))
    return "\n".join(parts)


def models_page() -> str:
    """Return the page of all models."""
    schemas = document()["components"]["schemas"]
    parts = ["# REST models\n\nWhat the [routes](rest.md) take and answer. A field with a default may be left out.\n"]
    parts += [_model(name, schema) for name, schema in sorted(schemas.items())]
    return "\n".join(parts)


def _model(name: str, schema: dict[str, Any]) -> str:
    parts = [f"## {name} {{ #{name.lower()} }}\n"]
    if said := from_docstring(schema.get("description")):
        parts.append(said + "\n")
    required = schema.get("required", [])
    fields = [
        (
            code(field),
            type_of(kind, ""),
            "required" if field in required else code(_json(kind["default"])) if "default" in kind else "",
            from_docstring(kind.get("description")),
        )
        for field, kind in schema.get("properties", {}).items()
    ]
    if fields:
        parts.append(table(("Field", "Type", "Default", "Meaning"), fields))
    elif schema.get("type") != "object":
        parts.append(type_of(schema, "") + "\n")
    return "\n".join(parts)


def _json(value: Any) -> str:
    return json.dumps(value)


def type_of(schema: dict[str, Any], page: str = _MODELS) -> str:
    """Return a schema's type in words, with links to models on ``page`` (empty: on this one)."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_PREFIX)
        return f"[{name}]({page}#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(choice, page) for choice in schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(code(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        if parts := schema.get("prefixItems"):
            return "array of " + ", ".join(type_of(part, page) for part in parts)
        return f"array of {type_of(schema.get('items') or {}, page)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_of(schema['additionalProperties'], page)}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"), ("maxLength", "at most"))
        if key in schema and not (key == "minimum" and schema[key] == 0)
    ]
    unit = " characters" if "maxLength" in schema else ""
    return f"{kind}, {', '.join(bounds)}{unit}" if bounds else str(kind)
