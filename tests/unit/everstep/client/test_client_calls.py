"""The clients cover the REST API: every route, every parameter, and the type of every answer."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

from everstep.client import AsyncClient, Call, Client, calls
from everstep.client.exchange import Listing
from everstep.wire.v1 import enrolment
from everstep.wire.v1.operator_history import PolicyChange
from everstep_controller.api.routes import PLAIN_ROUTES, ROUTES
from everstep_controller.api.web_page import openapi_document

BUILDERS: dict[str, Callable[..., Call[Any] | Listing[Any, Any]]] = {
    name: build
    for name, build in vars(calls).items()
    if inspect.isfunction(build) and build.__module__ == calls.__name__ and not name.startswith("_")
}
SAMPLES: dict[str, Any] = {
    "nodes": ("n1",),
    "size": 2,
    "until": 2.0,
    "reason": "a test",
    "change": PolicyChange(),
    "request": enrolment.IssueViewer(subject="olga", reason="a test"),
    "secret_hash": "0" * 64,
    "node": "n1",
    "job": "llama",
    "verdict": "n1-1",
    "probe": "p1",
    "id": "0" * 16,
}
CLIENT_ONLY = {"send", "send_to_all", "stream", "follow", "close", "controllers"}


def build(name: str) -> Call[Any] | Listing[Any, Any]:
    """Return the call with a value for every parameter that has no default."""
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    needed = {
        parameter.name: SAMPLES[parameter.name]
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
    }
    return BUILDERS[name](**needed)


def operation_of(call: Call[Any] | Listing[Any, Any]) -> str:
    """Return the operationId of the route in the OpenAPI document; a path without parameters comes first."""
    method = call.method.lower() if isinstance(call, Call) else "get"
    for template, operations in sorted(openapi_document()["paths"].items(), key=lambda item: item[0].count("{")):
        if method in operations and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), call.path):
            found: str = operations[method]["operationId"]
            return found
    raise AssertionError(f"the API has no {method} {call.path}")


def operations() -> dict[str, dict[str, Any]]:
    paths = openapi_document()["paths"].values()
    return {operation["operationId"]: operation for methods in paths for operation in methods.values()}


def test_calls_cover_every_route() -> None:
    assert {operation_of(build(name)) for name in BUILDERS} | {"stream"} == operations().keys()


def test_calls_cover_every_order_on_nodes() -> None:
    orders = {build(name).path.rpartition("/")[2] for name in BUILDERS if operation_of(build(name)) == "order"}
    (parameter,) = (parameter for parameter in operations()["order"]["parameters"] if parameter["name"] == "order")
    assert orders == set(parameter["schema"]["enum"])


def test_calls_cover_every_query_parameter() -> None:
    given: dict[str, set[str]] = {}
    for name in BUILDERS:
        made = build(name)
        names = set(made.query)
        if isinstance(made, Listing):
            names |= {"limit", "cursor" if made.after is None else "after"}
        given.setdefault(operation_of(made), set()).update(names)
    for id, operation in operations().items():
        wanted = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"}
        assert id == "stream" or given[id] == wanted, id


@pytest.mark.parametrize("name", BUILDERS)
def test_call_has_the_types_of_its_route(name: str) -> None:
    made = build(name)
    id = operation_of(made)
    if id in PLAIN_ROUTES:
        return
    route = ROUTES[id]
    assert made.kind is route.response
    if isinstance(made, Call) and route.body is not None:
        assert isinstance(made.body, get_args(route.body) or route.body)


def test_clients_have_a_method_for_every_call() -> None:
    for kind, own in ((Client, CLIENT_ONLY), (AsyncClient, CLIENT_ONLY - {"close"} | {"aclose"})):
        methods = {name for name in vars(kind) | vars(kind.__base__) if not name.startswith("_")}
        assert methods == BUILDERS.keys() | own
        for name, made in BUILDERS.items():
            method = getattr(kind, name)
            assert method.__doc__ == made.__doc__
            wanted = list(inspect.signature(made).parameters.values())
            assert list(inspect.signature(method).parameters.values())[1:] == wanted


@pytest.mark.parametrize(
    "module",
    [
        "everstep.client",
        "everstep.cli.main",
        "everstep_agent.main",
        "everstep_trainer.launch.services.private_services",
    ],
)
def test_import_loads_no_network_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('httpx', 'tenacity', 'ssl') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert set(eval(done.stdout)) <= ({"ssl"} if module.startswith(("everstep_agent", "everstep_tr")) else set())
