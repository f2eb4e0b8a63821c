"""What can go wrong, as a tree.

::

    EverstepError
    ├── ConfigurationError (ValueError)   settings that contradict each other or the machine
    ├── ProtocolError                     the other side said something we cannot accept
    │   ├── VersionMismatch               no protocol version in common
    │   ├── MalformedMessage              truncated, oversized, or not of the declared shape
    │   │   ├── TooLarge                  more bytes than this side reads
    │   │   └── WrongMediaType            a body of another form than is read
    │   └── StaleGeneration               the message speaks for a generation that is over
    ├── AuthenticationError               no, or a wrong, token or secret
    ├── PermissionDenied                  a right token, for something else
    ├── NotFound                          no such node, job, generation, verdict or slot
    ├── Outdated                          it has changed since you looked (If-Match)
    ├── Conflict                          refused in the present state: over budget, already held, ...
    ├── Unavailable                       the other side is away; try again after ``retry_after_s``
    ├── RateLimited                       more requests than this identity may send
    └── CheckpointError
        ├── DigestMismatch                bytes are not what was sealed
        ├── NotRestorable                 no version is whole
        └── OutOfSlotMemory               the vault has no room; the arithmetic is in the message

Every class carries the HTTP status the controller answers with and a stable ``code`` for machines.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message of the type asked for, or one that is nested without end."""


class EverstepError(Exception):
    """Base of all errors this project raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"


class ConfigurationError(EverstepError, ValueError):
    """Settings that contradict each other or the machine; the message says which and how to mend it."""

    status = 422
    code = "configuration"


class ProtocolError(EverstepError):
    """The other side said something that cannot be accepted."""

    status = 400
    code = "protocol"


class VersionMismatch(ProtocolError):
    """No protocol version in common; the message names both ranges and which side to upgrade."""

    status = 426
    code = "protocol_version"


class MalformedMessage(ProtocolError):
    """Truncated, oversized, or not of the declared shape."""

    status = 422
    code = "malformed"


class TooLarge(MalformedMessage):
    """More bytes than this side reads; the message names the limit."""

    status = 413
    code = "too_large"


class WrongMediaType(MalformedMessage):
    """A body that says it is of another form than the one that is read."""

    status = 415
    code = "media_type"


class StaleGeneration(ProtocolError):
    """The message speaks for a generation, incarnation or session that is over."""

    status = 409
    code = "stale"


class AuthenticationError(EverstepError):
    """No token, or one that does not verify."""

    status = 401
    code = "unauthenticated"


class PermissionDenied(EverstepError):
    """A valid token that does not allow this."""

    status = 403
    code = "forbidden"


class NotFound(EverstepError):
    """No such node, job, generation, verdict or slot."""

    status = 404
    code = "not_found"


class Conflict(EverstepError):
    """Refused in the present state."""

    status = 409
    code = "conflict"


class Outdated(EverstepError):
    """What was to be changed is not as it was when the client looked; it should look again."""

    status = 412
    code = "outdated"


class Unavailable(EverstepError):
    """The other side is away or overloaded.

    Args:
        retry_after_s: when it makes sense to try again, seconds.
    """

    status = 503
    code = "unavailable"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(EverstepError):
    """More requests than this identity may send.

    Args:
        retry_after_s: when the next one will be taken, seconds.
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
    """Bytes are not what was sealed."""

    status = 422
    code = "digest_mismatch"


class NotRestorable(CheckpointError):
    """No version is whole among the holders that answer."""

    status = 409
    code = "not_restorable"


class OutOfSlotMemory(CheckpointError):
    """The vault has no room for the slots; the message shows the arithmetic."""

    status = 507
    code = "slot_memory"


def _classes(kind: type[EverstepError]) -> dict[str, type[EverstepError]]:
    found: dict[str, type[EverstepError]] = {}
    for child in kind.__subclasses__():
        found |= _classes(child)
    return found | {kind.code: kind}


BY_CODE = _classes(EverstepError)
"""The class that a code stands for; of several with one code, the one that the others are kinds of."""
