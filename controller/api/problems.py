"""How every refusal is said over HTTP: RFC 9457 problem details."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from everstep.errors import EverstepError

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
