"""Define the errors of this project, as a tree.

::

    EverstepError
    ├── ConfigurationError (ValueError)   settings that contradict each other or the machine
    ├── ProtocolError                     the other side's message cannot be accepted
    │   ├── VersionMismatch               no protocol version in common
    │   ├── MalformedMessage              truncated, oversized, or not of the declared shape
    │   │   ├── TooLarge                  more bytes than this side reads
    │   │   └── WrongMediaType            a body of another form than the one that is read
    │   └── StaleGeneration               the message speaks for a generation that is over
    ├── AuthenticationError               no token or secret, or a wrong one
    ├── PermissionDenied                  a valid token without this right
    ├── NotFound                          no such node, job, generation, verdict or slot
    ├── Outdated                          changed since the client looked (If-Match)
    ├── Conflict                          refused in the present state: over budget, already held, ...
    ├── Unavailable                       the other side is away; try again after ``retry_after_s``
    ├── RateLimited                       more requests than this identity may send
    └── CheckpointError
        ├── DigestMismatch                bytes are not those sealed
        ├── NotRestorable                 no version is complete
        └── OutOfSlotMemory               the vault has no room; the message has the arithmetic

Every class has the HTTP status that the controller answers with, and a stable ``code`` for machines.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message of the expected type, or nested without end."""


class EverstepError(Exception):
    """Base of all errors that this project raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"


class ConfigurationError(EverstepError, ValueError):
    """Settings contradict each other or the machine; the message says which ones, and how to fix them."""

    status = 422
    code = "configuration"


class ProtocolError(EverstepError):
    """The other side's message cannot be accepted."""

    status = 400
    code = "protocol"


class VersionMismatch(ProtocolError):
    """The sides have no protocol version in common; the message names both ranges and the side to upgrade."""

    status = 426
    code = "protocol_version"


class MalformedMessage(ProtocolError):
    """A message is truncated, oversized, or not of the declared shape."""

    status = 422
    code = "malformed"


class TooLarge(MalformedMessage):
    """A message has more bytes than this side reads; the message names the limit."""

    status = 413
    code = "too_large"


class WrongMediaType(MalformedMessage):
    """A body declares another form than the one that is read."""

    status = 415
    code = "media_type"


class StaleGeneration(ProtocolError):
    """The message speaks for a generation, incarnation or session that is over."""

    status = 409
    code = "stale"


class AuthenticationError(EverstepError):
    """There is no token, or one that does not verify."""

    status = 401
    code = "unauthenticated"


class PermissionDenied(EverstepError):
    """The token is valid, but does not allow this."""

    status = 403
    code = "forbidden"


class NotFound(EverstepError):
    """There is no such node, job, generation, verdict or slot."""

    status = 404
    code = "not_found"


class Conflict(EverstepError):
    """The request is refused in the present state."""

    status = 409
    code = "conflict"


class Outdated(EverstepError):
    """The object has changed since the client looked; the client should look again."""

    status = 412
    code = "outdated"


class Unavailable(EverstepError):
    """The other side is away or overloaded.

    Args:
        retry_after_s: Seconds after which a retry makes sense.
    """

    status = 503
    code = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(EverstepError):
    """This identity sent more requests than it may.

    Args:
        retry_after_s: Seconds until the next request is accepted.
    """

    status = 429
    code = "rate_limited"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CheckpointError(EverstepError):
    """A version cannot be written or read."""

    code = "checkpoint"


class DigestMismatch(CheckpointError):
    """Bytes are not those that were sealed."""

    status = 422
    code = "digest_mismatch"


class NotRestorable(CheckpointError):
    """No version is complete among the holders that answer."""

    status = 409
    code = "not_restorable"


class OutOfSlotMemory(CheckpointError):
    """The vault has no room for the slots; the message has the arithmetic."""

    status = 507
    code = "slot_memory"


def _classes(kind: type[EverstepError]) -> dict[str, type[EverstepError]]:
    found: dict[str, type[EverstepError]] = {}
    for child in kind.__subclasses__():
        found |= _classes(child)
    return found | {kind.code: kind}


BY_CODE = _classes(EverstepError)
"""The class of each code; of several with one code, their base class."""
