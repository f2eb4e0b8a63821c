"""Generate the OpenAPI document from the route table and the message types."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from everstep import __version__
from everstep.ids import portable_json_schema
from everstep_controller.api.routes import PATH_PARAMETERS, PLAIN_ROUTES, QUERY_PARAMETERS, ROUTES, Route
from everstep_controller.auth.authenticator import RouteAccess
from everstep_controller.server import responses

_REF = "#/components/schemas/{name}"
_OTHER_MEDIA = {"stream": "text/event-stream", "metrics": "text/plain"}
_MEANINGS = {
    304: "Not modified since the response with that tag.",
    401: "Missing or invalid token.",
    403: "Token has no permission for this.",
    404: "Not found.",
    409: "Conflict with the current state.",
    412: "Changed since you read it (If-Match).",
    413: "Request body over 1 MiB.",
    415: "Request body is not JSON.",
    422: "Malformed message.",
    426: "No common protocol version.",
    429: "Too many requests: retry after Retry-After seconds.",
    503: "Temporarily unavailable: retry after Retry-After seconds.",
}
_PULSE = {"type": "object", "required": ["ok", "role"], "properties": {"ok": {"type": "boolean"}}}
_RETRY_AFTER = {
    "Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True, "description": "Seconds."}
}
_ETAG = {"ETag": {"required": True, "schema": {"type": "string"}, "description": "The entity tag."}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameter(name: str, place: str, kind: Any, required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "schema": msgspec.json.schema(kind)}


def _parameters(route: Route) -> list[dict[str, Any]]:
    in_path = [_parameter(name, "path", PATH_PARAMETERS[name], True) for name in re.findall(r"\{(\w+)\}", route.path)]
    in_query = [_parameter(name, "query", QUERY_PARAMETERS[name], False) for name in route.query]
    headers = ["If-None-Match"] * route.has_etag + ["If-Match"] * bool(route.etag_source)
    return in_path + in_query + [_parameter(name, "header", str, False) for name in headers]


def _description(route: Route) -> str:
    text = f"Token of: {route.access}."
    if route.etag_source:
        text += (
            f" With If-Match: refused (412) if the ETag of GET {route.etag_source} has changed, so that a repeated "
            "order is not carried out twice. Never required (no 428)."
        )
    return text + f" {route.idempotency}: there is no If-Match." if route.idempotency else text


def _refusals(route: Route) -> dict[str, Any]:
    """Return the error responses of a route, by status."""
    if route.access is RouteAccess.OPEN:
        return {}
    statuses = {401, 403, 429, 503}
    if "{" in route.path:
        statuses |= {404}
    if route.path.startswith("/v1/") and (route.body is not None or route.query):
        statuses |= {422}
    if route.body is not None:
        statuses |= {404, 409, 413, 415}
    if route.etag_source:
        statuses |= {412}
    content = {responses.MEDIA_TYPE: {"schema": {"$ref": _REF.format(name="Problem")}}}
    return {
        str(status): {"description": _MEANINGS[status], "content": content}
        | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})
        for status in sorted(statuses)
    }


def _operation(name: str, route: Route, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if route.response is not None:
        done = _json(schemas[route.response])
    else:
        done = {_OTHER_MEDIA[name]: {"schema": {"type": "string"}}} if name in _OTHER_MEDIA else _json(_PULSE)
    tagged = {"headers": _ETAG} if route.has_etag else {}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "description": _description(route),
        "tags": ["operators"],
        "security": [] if route.access is RouteAccess.OPEN else [{"bearer": []}, {"certificate": []}],
        "parameters": _parameters(route),
        "responses": {
            "200": {"description": "Done.", "content": done, **tagged},
            **({"304": {"description": _MEANINGS[304], **tagged}} if tagged else {}),
            **_refusals(route),
        },
    }
    if name == "ready":
        operation["responses"]["503"] = {"description": "The controller does not serve.", "content": _json(_PULSE)}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[route.body])}
    return operation


def _for_generators(schema: Any) -> Any:
    """Give every array the ``items`` that code generators need; ``maxItems`` keeps tuples closed."""
    if isinstance(schema, list):
        return [_for_generators(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _for_generators(value) for key, value in schema.items()}
    if plain.get("type") == "array" and not isinstance(plain.get("items"), dict):
        parts = plain.get("prefixItems", []) if plain.get("items") is False else []
        kinds = [part for index, part in enumerate(parts) if part not in parts[:index]]
        plain["items"] = {} if not kinds else kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return plain


def document() -> dict[str, Any]:
    """Return the whole document."""
    routes = {**ROUTES, **PLAIN_ROUTES}
    kinds = list({kind: None for route in routes.values() for kind in (route.response, route.body) if kind is not None})
    out, components = msgspec.json.schema_components((*kinds, responses.Problem), ref_template=_REF)
    schemas = dict(zip(kinds, out, strict=False))
    paths: dict[str, Any] = {}
    for name, route in routes.items():
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(name, route, schemas)
    bearer = "A token of `everstep token` or `everstep-controller`."
    name_in_certificate = "Its name is everstep://agent/NODE, /operator/NAME or /viewer/NAME."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Everstep controller", "version": __version__},
        "paths": _for_generators(portable_json_schema(paths)),
        "components": {
            "schemas": _for_generators(portable_json_schema(components)),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": bearer},
                "certificate": {"type": "mutualTLS", "description": name_in_certificate},
            },
        },
    }
