"""The little of HTTP that hot routes need: bounded bodies in, encoded bodies and errors out."""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from everstep.errors import (
    DECODE_ERRORS,
    EverstepError,
    MalformedMessage,
    RateLimited,
    TooLarge,
    Unavailable,
    WrongMediaType,
)

# ---- problems
# How every refusal is said over HTTP: RFC 9457 problem details.

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:everstep:error:"

TITLES = MappingProxyType(
    {
        "internal": "An error of the controller's own",
        "configuration": "Settings that contradict each other",
        "protocol": "Something that cannot be accepted",
        "protocol_version": "No protocol version in common",
        "malformed": "Not a message of the declared shape",
        "too_large": "More bytes than are read",
        "media_type": "A body of another form than is read",
        "stale": "Of a generation or life that is over",
        "unauthenticated": "No token, or one that does not verify",
        "forbidden": "A right token, for something else",
        "not_found": "No such thing",
        "method": "This path has another method",
        "conflict": "Refused in the present state",
        "outdated": "Not as it was when you looked",
        "unavailable": "Not now: come again",
        "rate_limited": "Too many requests",
        "checkpoint": "A version cannot be written or read",
        "digest_mismatch": "Bytes are not what was sealed",
        "not_restorable": "No version is whole",
        "slot_memory": "No room for slots",
        "http": "Not a request that is understood",
    }
)
"""By code: what RFC 9457 calls the title, the same for every occurrence."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``type`` and ``code`` are for machines, ``detail`` is a sentence that says what to do.

    ``retry_after_s``: when to come again, where the header Retry-After, in whole seconds, is too coarse for it.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    retry_after_s: float | None = None


def problem(status: int, code: str, detail: str, retry_after_s: float | None = None) -> bytes:
    """The body of an answer that refuses."""
    said = Problem(
        type=TYPE_PREFIX + code,
        title=TITLES.get(code, code),
        status=status,
        detail=detail,
        code=code,
        retry_after_s=retry_after_s,
    )
    return msgspec.json.encode(said)


def problem_of(error: EverstepError) -> bytes:
    """The body of an answer that refuses for this error."""
    return problem(error.status, error.code, str(error), getattr(error, "retry_after_s", None))


T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

_encoder = msgspec.json.Encoder()
_LENGTH_DIGITS = 18
_NUL_ESCAPE = b"\\u0000"
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def encode(message: object) -> bytes:
    """A message in JSON."""
    body: bytes = _encoder.encode(message)
    return body


class ClientGone(Exception):  # not an error of ours: nobody is left to answer
    """The client closed its connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body.

    Raises WrongMediaType for one that says it is no JSON, TooLarge as soon as it is over ``limit`` bytes, ClientGone
    when it breaks off.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > _LENGTH_DIGITS or int(value) > limit):
            raise TooLarge(f"a body of {value[:20].decode()} bytes is over the limit of {limit}: send less at a time")
        if name == b"content-type" and value.partition(b";")[0].strip().lower() != b"application/json":
            shown = value[:100].decode("latin-1")
            raise WrongMediaType(
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
    """The message in ``body``. Raises MalformedMessage with the path of what is wrong.

    A NUL in a text, which PostgreSQL cannot store, is replaced: the tail of a crashed rank's output may hold some, and
    its report must not be refused for that.
    """
    if _NUL_ESCAPE in body:
        body = _NUL.sub(rb"\1\\ufffd", body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"not a valid message: {error}") from error
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"not valid JSON ({len(body)} bytes; truncated?): {error}") from error


def parse_query(scope: Scope) -> dict[str, str]:
    """The query string; a NUL is replaced, as in bodies. Raises MalformedMessage for a name that comes twice: which of
    the two was meant, nobody knows."""
    text = scope["query_string"].replace(b"%00", b"%EF%BF%BD").decode("latin-1")
    values = parse_qs(text, keep_blank_values=True)
    for name, given in values.items():
        if len(given) > 1:
            raise MalformedMessage(f"query parameter {name[:100]} is given {len(given)} times: give it once")
    return {name: given[0] for name, given in values.items()}


def int_parameter(values: dict[str, str], name: str, default: int | None = None) -> int:
    """Query parameter ``name`` as a number that is not negative. Raises MalformedMessage."""
    raw = values.get(name)
    if raw is None and default is not None:
        return default
    if raw is None or not raw.isascii() or not raw.isdigit() or len(raw) > 18:
        raise MalformedMessage(f"query parameter {name} must be a whole number of at most 18 digits, not {raw!r}")
    return int(raw)


def seconds_parameter(values: dict[str, str], name: str, default: float, limit: float) -> float:
    """Query parameter ``name`` in seconds, held within [0, limit]. Raises MalformedMessage."""
    try:
        value = float(values.get(name, default))
    except ValueError:
        raise MalformedMessage(f"query parameter {name} must be seconds, not {values[name]!r}") from None
    if not value >= 0:  # refuses NaN too
        raise MalformedMessage(f"query parameter {name} must not be negative: {value}")
    return min(value, limit)


async def send_answer(
    send: Send, body: bytes, status: int = 200, headers: Headers | None = None, media_type: bytes = b"application/json"
) -> None:
    """Sends an answer, in JSON if nothing else is said."""
    lines = [(b"content-type", media_type), (b"content-length", str(len(body)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: EverstepError) -> None:
    """Sends an error as the answer."""
    body = problem_of(error)
    await send_answer(send, body, error.status, error_headers(error), MEDIA_TYPE.encode())


def error_headers(error: EverstepError) -> Headers:
    """What an error's answer says beside its body."""
    if isinstance(error, Unavailable | RateLimited):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    if isinstance(error, TooLarge):
        return [(b"connection", b"close")]  # the rest of the body will not be read
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []
