"""Define names, numbers and addresses, and the rules that they must follow."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec


def full_match(pattern: str) -> msgspec.Meta:
    r"""Return a constraint for text that matches the whole pattern.

    Python's ``$`` lets a newline follow, and a name with one looks like another. A JSON schema's ``$`` does not, and
    ``\Z`` is unknown there: pass schemas through ``portable_json_schema``.
    """
    return msgspec.Meta(pattern=rf"^{pattern}\Z")


_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
"""The keywords of JSON Schema whose values are numbers."""


def portable_json_schema(part: Any) -> Any:
    """Return a JSON schema, or a part of one, as each Python makes it and other programs read it.

    Patterns of ``full_match`` end as schemas require. Descriptions are docstrings without their indentation, which
    Python removes itself only from 3.13 on. Whole bounds are integers: ``typing`` may answer ``Annotated[float,
    Meta(ge=0)]`` with the equal ``Meta(ge=0.0)`` of a module that was imported earlier.
    """
    if isinstance(part, dict):
        found = {name: portable_json_schema(value) for name, value in part.items()}
        if isinstance(pattern := found.get("pattern"), str) and pattern.endswith(r"\Z"):
            found["pattern"] = pattern.removesuffix(r"\Z") + "$"
        if isinstance(description := found.get("description"), str):
            found["description"] = inspect.cleandoc(description)
        for name in _BOUNDS & found.keys():
            if isinstance(bound := found[name], float) and bound.is_integer():
                found[name] = int(bound)
        return found
    return [portable_json_schema(each) for each in part] if isinstance(part, list) else part


NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_NAME = re.compile(NAME_PATTERN)

NodeId = Annotated[str, full_match(NAME_PATTERN)]
"""A machine, by the name its operator gave it (host name by default)."""

JobId = Annotated[str, full_match(NAME_PATTERN)]
"""A training run across restarts and regroupings."""

TraceId = Annotated[str, msgspec.Meta(max_length=64)]
"""One stimulus and all its consequences: in every message, log line and entry of the event log about a failure."""

ShortText = Annotated[str, msgspec.Meta(max_length=4096)]
LongText = Annotated[str, msgspec.Meta(max_length=65536)]
"""Text of a client. Every text that a client can send has a bound, since it may be stored, logged and shown."""

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A count or a number that every JSON reader and every database column holds exactly."""

SafeInt = Annotated[int, msgspec.Meta(ge=-(1 << 53), lt=1 << 53)]
"""The same, but possibly negative. Numbers from nodes are bounded, since they are stored and passed on."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
GenerationNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Incarnation = NonNegativeInt
"""One life of an agent or launcher: milliseconds of the wall clock at its start, so a later life is larger."""

Address = Annotated[str, full_match(r"[!-.0-~]{1,253}:[0-9]{1,5}")]
"""``host:port``, in ASCII."""


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A checkpoint version: the state after optimizer step ``step``, reached in ``generation``. The same step computed
    again in a later generation is another version. Ordered by generation, then step."""

    generation: GenerationNumber
    step: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.generation}:{self.step}"


def check_name(value: str, kind: str) -> str:
    """Return ``value`` if it may name a node or a job. Raises ValueError with the rule otherwise."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} cannot name a {kind}: use 1 to 63 letters, digits, dots, dashes or underscores, "
            "beginning with a letter or digit"
        )
    return value


def split_address(address: str) -> tuple[str, int]:
    """Return ``host:port`` as a pair. Raises ValueError for other text."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address: expected host:port, such as 127.0.0.1:7707")
    return host.strip("[]"), int(port)


_SECRET_WORDS = ("secret", "token", "key", "password", "passwd", "signature", "sig", "credential")


def storage_url_error(url: str) -> str:
    """Return why a job cannot write checkpoints to ``url``, with a fix; empty if it can.

    The controller stores, logs and shows the URL, so it must not contain credentials, and the answer does not repeat
    them. Processes that use storage take credentials from their own environment.
    """
    if "://" not in url:
        if url.startswith("/"):
            return ""
        return f"{url!r} is neither an absolute path nor a URL: every node reads it from where it is itself"
    parts = urlsplit(url)
    if "@" in parts.netloc or any(word in name.lower() for name, _ in parse_qsl(parts.query) for word in _SECRET_WORDS):
        return (
            f"the {parts.scheme} URL has credentials in it, which would be stored and shown: leave them out, and give "
            "them to agents and trainers by their environment or files, as the storage's own tools take them"
        )
    if parts.query or parts.fragment:
        return f"the {parts.scheme} URL has a query or a fragment: name a folder"
    return ""
