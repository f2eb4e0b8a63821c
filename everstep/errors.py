"""Define the errors of this project.

Every class has the HTTP status that the controller answers with, and a stable ``code`` for machines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec

from everstep.printable_text import escape_control

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
"""Exit status for settings that a person must correct; a service manager should not retry."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message of the expected type, or nested without end."""


class EverstepError(Exception):
    """Base of all errors that this project raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        """Set ``status`` and ``code``, which are otherwise the base class's."""
        cls.status, cls.code = status or cls.status, code or cls.code


class ConfigurationError(EverstepError, ValueError, status=422, code="configuration"):
    """Settings contradict each other or the machine; the message says which ones, and how to fix them."""


class ProtocolError(EverstepError, status=400, code="protocol"):
    """The other side's message cannot be accepted."""


class VersionMismatch(ProtocolError, status=426, code="protocol_version"):
    """The sides have no protocol version in common; the message names both ranges and the side to upgrade."""


class MalformedMessage(ProtocolError, status=422, code="malformed"):
    """A message is truncated, oversized, or not of the declared shape."""


class TooLarge(MalformedMessage, status=413, code="too_large"):
    """A message has more bytes than this side reads; the message names the limit."""


class WrongMediaType(MalformedMessage, status=415, code="media_type"):
    """A body declares another form than the one that is read."""


class StaleGeneration(ProtocolError, status=409, code="stale"):
    """The message speaks for a generation, incarnation or session that is over."""


class AuthenticationError(EverstepError, status=401, code="unauthenticated"):
    """There is no token, or one that does not verify."""


class PermissionDenied(EverstepError, status=403, code="forbidden"):
    """The token is valid, but does not allow this."""


class NotFound(EverstepError, status=404, code="not_found"):
    """There is no such node, job, generation, verdict or slot."""


class Conflict(EverstepError, status=409, code="conflict"):
    """The request is refused in the present state."""


class Outdated(EverstepError, status=412, code="outdated"):
    """The object has changed since the client looked; the client should look again."""


class Unavailable(EverstepError, status=503, code="unavailable"):
    """The other side is away or overloaded; a retry makes sense after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(EverstepError, status=429, code="rate_limited"):
    """This identity sent more requests than it may; the next one is accepted after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CheckpointError(EverstepError, code="checkpoint"):
    """A version cannot be written or read."""


class DigestMismatch(CheckpointError, status=422, code="digest_mismatch"):
    """Bytes are not those that were sealed."""


class NotRestorable(CheckpointError, status=409, code="not_restorable"):
    """No version is complete among the holders that answer."""


class OutOfSlotMemory(CheckpointError, status=507, code="slot_memory"):
    """The vault has no room for the slots; the message has the arithmetic."""


def _classes(kind: type[EverstepError]) -> dict[str, type[EverstepError]]:
    found: dict[str, type[EverstepError]] = {}
    for child in kind.__subclasses__():
        found |= _classes(child)
    return found | {kind.code: kind}


BY_CODE = _classes(EverstepError)
"""The class of each code; of several with one code, their base class."""


@contextmanager
def exit_on_errors(program: str, unusable: tuple[type[Exception], ...] = (ConfigurationError,)) -> Iterator[None]:
    """Print an error as one sentence and exit, with EXIT_UNUSABLE for errors of the kinds ``unusable``."""
    handled: tuple[type[Exception], ...] = (EverstepError, OSError, *unusable)
    try:
        yield
    except handled as error:
        print(f"{program}: {escape_control(str(error))}", file=sys.stderr)
        raise SystemExit(EXIT_UNUSABLE if isinstance(error, unusable) else EXIT_FAILED) from None
