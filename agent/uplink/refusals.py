"""What a controller's refusal is, whether it came as an HTTP answer or as a frame, and what silence is."""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec

from everstep.errors import BY_CODE, UNREADABLE, EverstepError, ProtocolError, RateLimited, Unavailable
from everstep.wire.v1.session import Refused

LONGEST_MESSAGE = 1000

LONGEST_RETRY_AFTER_S = 5.0
LONGEST_RETRY_AFTER_BUSY_S = 1.0
"""What a controller may ask at most: a node with a job waits for directives that its ranks wait for."""


class NoAnswer(Unavailable):
    """A controller took a connection, or not even refused it, and then said nothing in time."""


class _Said(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Problem(msgspec.Struct):
    """RFC 9457 problem details with our ``code``, or our older ``{"error": ...}``."""

    code: str = ""
    detail: str = ""
    retry_after_s: float | None = None
    error: _Said = msgspec.field(default_factory=_Said)


_BY_STATUS = {401: "unauthenticated", 403: "forbidden", 404: "not_found", 409: "stale", 413: "malformed",
              422: "malformed", 426: "protocol_version", 429: "rate_limited"}  # fmt: skip


def error_of(status: int, body: bytes, retry_after: str, url: str) -> EverstepError:
    """The error that an HTTP answer stands for; what is no answer of ours is told by its status.

    Args:
        retry_after: the header of that name, as it came; a date counts as none.
    """
    try:
        said = msgspec.json.decode(body, type=_Problem)
    except UNREADABLE:
        said = _Problem()
    code = said.code or said.error.code
    reason = (said.detail or said.error.message)[:LONGEST_MESSAGE] or _phrase(status)
    message = f"{url}: {reason} ({status})"
    after_s = said.retry_after_s
    if after_s is None and retry_after.isascii() and retry_after.isdigit():
        after_s = float(retry_after)
    if status >= 500:
        return _error(Unavailable, message, after_s)
    return _error(BY_CODE.get(code) or BY_CODE.get(_BY_STATUS.get(status, ""), ProtocolError), message, after_s)


def error_in(refused: Refused, url: str) -> EverstepError:
    """The error that a frame stands for."""
    message = f"{url}: {refused.message[:LONGEST_MESSAGE]} ({refused.code})"
    return _error(BY_CODE.get(refused.code, ProtocolError), message, refused.retry_after_s)


def retry_after_s(error: EverstepError, *, busy: bool) -> float:
    """Seconds that the controller asked us to stay away, within reason; 0 where it asked for none."""
    if not isinstance(error, Unavailable | RateLimited) or not math.isfinite(error.retry_after_s):
        return 0.0
    return min(max(error.retry_after_s, 0.0), LONGEST_RETRY_AFTER_BUSY_S if busy else LONGEST_RETRY_AFTER_S)


def _error(kind: type[EverstepError], message: str, after_s: float | None) -> EverstepError:
    if issubclass(kind, Unavailable | RateLimited):
        return kind(message, after_s or 0.0)
    return kind(message)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
