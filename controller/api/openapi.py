"""The OpenAPI document: FastAPI knows the routes' functions, this knows their messages."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from controller.api.routes import AGENT, OPERATOR, Access, Route
from everstep import __version__

_REF = "#/components/schemas/{name}"
_WHOLE = {"after", "limit", "incarnation"}
_OPEN_PATHS: dict[str, Any] = {
    "/healthz": {"get": {"summary": "Whether the process lives.", "responses": {"200": {"description": "It does."}}}},
    "/readyz": {
        "get": {
            "summary": "Whether it serves.",
            "responses": {"200": {"description": "It does."}, "503": {"description": "Not now."}},
        }
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    in_query = [
        {
            "name": name,
            "in": "query",
            "required": name == "incarnation",
            "schema": {"type": "integer", "minimum": 0} if name in _WHOLE else {"type": "string"},
        }
        for name in route.query
    ]
    return in_path + in_query


def _operation(name: str, route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "description": f"Token: {route.access}.",
        "tags": ["agents" if route.access is Access.AGENT else "operators"],
        "security": [{"bearer": []}],
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "Done.", "content": _json(schemas[route.answers])},
            "default": {"description": "Refused.", "content": _json({"$ref": _REF.format(name="Error")})},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.body])}
    return operation


def document() -> dict[str, Any]:
    """The whole document."""
    routes = {**OPERATOR, **AGENT}
    kinds = list({kind: None for route in routes.values() for kind in (route.answers, route.body) if kind is not None})
    out, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas = dict(zip(kinds, out, strict=True))
    paths: dict[str, Any] = {path: dict(item) for path, item in _OPEN_PATHS.items()}
    for name, route in routes.items():
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(name, route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Everstep controller", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
