"""Page of the Python client's methods: a table with their routes, and their parameters from the docstrings."""

from __future__ import annotations

import inspect
from urllib.parse import unquote

from everstep.client import Call, calls
from tools.docs_site import markdown

_HEADER = """# Methods of the Python client

[Python client](client.md) explains how to use them. Each method sends one call of the [REST API](rest.md). A method
that returns a message returns it from `Client`, and is a coroutine of `AsyncClient`. A list of entries is a `PagedList`
or `AsyncPagedList`. Messages are described in the [REST models](rest-models.md).
"""
_CLASSES = ("Client", "AsyncClient", "PagedList", "AsyncPagedList", "Call", "Health", "read_token")
_PARAMETERS = """## Parameters

Each function below builds the call that the method of the same name sends.

::: everstep.client.calls
    options:
      show_root_heading: false
      show_root_toc_entry: false
      heading_level: 3
"""


def methods() -> list[tuple[str, str, str]]:
    """Return the name, route and answer of every method."""
    found = []
    for name, build in vars(calls).items():
        if name.startswith("_") or not inspect.isfunction(build) or build.__module__ != calls.__name__:
            continue
        needed = [
            parameter.name
            for parameter in inspect.signature(build).parameters.values()
            if parameter.default is parameter.empty
        ]
        made = build(**{parameter: f"{{{parameter}}}" for parameter in needed})
        is_call = isinstance(made, Call)
        route = f"{made.method if is_call else 'GET'} {unquote(made.path)}"
        found.append((name, route, made.kind.__name__ if is_call else f"entries of {made.kind.__name__}"))
    return found


def page() -> str:
    """Return the page."""
    rows = [[f"`{name}`", f"`{route}`", f"`{answer}`"] for name, route, answer in methods()]
    rows.append(["`stream`, `follow`", "`GET /v1/events/stream`", "`Event` and `EventGap`"])
    parts = [_HEADER, markdown.table(["Method", "Route", "Returns"], rows), "\n## Classes\n"]
    parts += [f"::: everstep.client.{name}\n    options:\n      heading_level: 3\n" for name in _CLASSES]
    return "\n".join([*parts, _PARAMETERS])
