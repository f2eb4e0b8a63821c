"""HTTP helpers for hot routes: bounded request bodies, encoded responses, and RFC 9457 errors."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from everstep import errors
from everstep.errors import EverstepError, MalformedMessage, TooLarge
from everstep_controller.leadership.lease import NotLeadingError

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:everstep:error:"

TITLES = MappingProxyType(
    {
        "internal": "Internal error of the controller",
        "configuration": "Invalid settings",
        "protocol": "Protocol error",
        "protocol_version": "No common protocol version",
        "malformed": "Malformed message",
        "too_large": "Request body too large",
        "media_type": "Unsupported media type",
        "stale": "Outdated generation or incarnation",
        "unauthenticated": "Missing or invalid token",
        "forbidden": "Token has no permission for this",
        "not_found": "Not found",
        "method": "Method not allowed",
        "conflict": "Conflict with the current state",
        "outdated": "Changed since you read it (If-Match)",
        "unavailable": "Temporarily unavailable",
        "rate_limited": "Too many requests",
        "checkpoint": "Checkpoint version cannot be written or read",
        "digest_mismatch": "Digest mismatch",
        "not_restorable": "No restorable version",
        "slot_memory": "Not enough memory for checkpoint slots",
        "http": "Invalid HTTP request",
    }
)
"""RFC 9457 titles by code, the same for every occurrence."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of every error response (RFC 9457). ``type`` and ``code`` are for programs, ``detail`` is for people.

    ``retry_after_s`` is finer than the Retry-After header, which has whole seconds. A standby adds ``role`` and
    ``leader``, the leader's address if it is known.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    retry_after_s: float | None = None
    role: str = ""
    leader: str = ""


def problem(status: int, code: str, detail: str, **members: Any) -> bytes:
    """Return the body of an error response; ``members`` are further fields of ``Problem``."""
    return msgspec.json.encode(
        Problem(
            type=TYPE_PREFIX + code, title=TITLES.get(code, code), status=status, detail=detail, code=code, **members
        )
    )


def problem_of(error: EverstepError) -> bytes:
    """Return the body of the response for this error."""
    members: dict[str, Any] = {"retry_after_s": getattr(error, "retry_after_s", None)}
    if isinstance(error, NotLeadingError):
        members |= {"role": "standby", "leader": error.leader}
    return problem(error.status, error.code, str(error), **members)


T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

_encoder = msgspec.json.Encoder()
_LENGTH_DIGITS = 18
_NUL_ESCAPE = b"\\u0000"
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def encode(message: object) -> bytes:
    """Return a message in JSON."""
    body: bytes = _encoder.encode(message)
    return body


class ClientGone(Exception):  # no EverstepError: no client is left to answer
    """The client closed its connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the request's body. Raises WrongMediaType, ClientGone, or TooLarge once it exceeds ``limit`` bytes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > _LENGTH_DIGITS or int(value) > limit):
            raise TooLarge(f"a body of {value[:20].decode()} bytes is over the limit of {limit}: send less at a time")
        if name == b"content-type" and value.partition(b";")[0].strip().lower() != b"application/json":
            shown = value[:100].decode("latin-1")
            raise errors.WrongMediaType(
                f"the body must be application/json, not {shown!r}: send `Content-Type: application/json`"
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body is over the limit of {limit} bytes: send less at a time")
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the message in ``body``, with NULs in text replaced for PostgreSQL. Raises MalformedMessage."""
    if _NUL_ESCAPE in body:
        body = _NUL.sub(rb"\1\\ufffd", body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"not a valid message: {error}") from error
    except errors.DECODE_ERRORS as error:
        raise MalformedMessage(f"not valid JSON ({len(body)} bytes; truncated?): {error}") from error


def parse_query(scope: Scope) -> dict[str, str]:
    """Return the query's parameters, with NULs replaced as in bodies. Raises MalformedMessage for a repeated name."""
    text = scope["query_string"].replace(b"%00", b"%EF%BF%BD").decode("latin-1")
    values = parse_qs(text, keep_blank_values=True)
    for name, given in values.items():
        if len(given) > 1:
            raise MalformedMessage(f"query parameter {name[:100]} is given {len(given)} times: give it once")
    return {name: given[0] for name, given in values.items()}


def int_parameter(values: dict[str, str], name: str, default: int | None = None) -> int:
    """Return query parameter ``name`` as a non-negative integer. Raises MalformedMessage."""
    raw = values.get(name)
    if raw is None and default is not None:
        return default
    if raw is None or not raw.isascii() or not raw.isdigit() or len(raw) > 18:
        raise MalformedMessage(f"query parameter {name} must be a whole number of at most 18 digits, not {raw!r}")
    return int(raw)


async def send_answer(
    send: Send, body: bytes, status: int = 200, headers: Headers | None = None, media_type: bytes = b"application/json"
) -> None:
    """Send a response, by default as JSON."""
    lines = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def last_response(status: int, body: bytes, headers: Headers) -> bytes:
    """Return a whole error response, after which the connection is closed."""
    length = str(len(body)).encode()
    own = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", length), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), *map(b": ".join, own + headers)]
    return b"\r\n".join((*lines, b"", body))


def error_headers(error: EverstepError) -> Headers:
    """Return the headers of an error response. ``Everstep-Leader`` is for clients that read no bodies."""
    if isinstance(error, errors.Unavailable | errors.RateLimited):
        headers = [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
        if isinstance(error, NotLeadingError) and error.leader:
            headers.append((b"everstep-leader", error.leader.encode()))
        return headers
    if isinstance(error, TooLarge):
        return [(b"connection", b"close")]  # the rest of the body will not be read
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
