"""A notice, and the finding that reports it."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity

MAX_TEXT = 200
"""Maximum characters of a provider's text in a subject or message."""


class NoticeError(Exception):
    """A source answered with something that cannot be understood. Its earlier notices stand."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement that concerns this node."""

    subject: str
    """Source and id, such as ``aws/spot-instance-action``; the same as long as the notice stands."""
    message: str
    """What will happen, as a sentence without its time."""
    deadline: float | None = None
    """Time of the event by the source's clock, in wall seconds; None if the source does not tell it."""
    within_s: float | None = None
    """Seconds from the first sighting to the event, for sources that announce no time."""
    drains: bool = True
    """False for an event that a node survives, such as a live migration."""
    is_scheduled: bool = False
    """True if it may be announced long before: the node is drained only shortly before the deadline."""


def to_finding(notice: Notice, first_seen: float, source_now: float, lead_s: float) -> Finding:
    """Return the finding: a drain, or information if the event is harmless or more than ``lead_s`` ahead."""
    deadline = notice.deadline
    if deadline is None and notice.within_s is not None:
        deadline = first_seen + notice.within_s
    is_ahead = notice.is_scheduled and deadline is not None and deadline - source_now > lead_s
    is_drain = notice.drains and not is_ahead
    message = notice.message if deadline is None else f"{notice.message} at {_format_time(deadline)}"
    if is_ahead and notice.drains:
        message += f"; the node is drained {lead_s:g} s before"
    return Finding(
        kind=FindingKind.NODE_NOTICE,
        subject=notice.subject,
        severity=Severity.WARNING if is_drain else Severity.INFO,
        action=Action.DRAIN if is_drain else Action.NONE,
        mode=Mode.ENFORCE if is_drain else Mode.OBSERVE,
        message=message,
        rule="node-notice",
        source="the provider's or the site's notice",
        value=deadline,
        since=first_seen,
    )


def clip(value: object) -> str:
    """Return a provider's text on one line, without control characters and bounded in length."""
    return "".join(c if c.isprintable() else " " for c in str(value))[:MAX_TEXT].strip()


def decode_json(body: bytes) -> object:
    """Decode an answer. Raises NoticeError if it is no JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoticeError(f"no JSON: {error}") from error


def parse_time(text: object) -> float:
    """Return wall seconds of an ISO 8601 or RFC 2822 time, or of a number. Raises NoticeError for anything else.

    A time without a zone is in UTC, as the providers write it.
    """
    if isinstance(text, int | float) and 0 < text < 1e11:
        return float(text)
    try:
        found = datetime.fromisoformat(str(text).strip())
    except ValueError:
        # Imported late: only agents that read a metadata service need it.
        from email.utils import parsedate_to_datetime

        try:
            found = parsedate_to_datetime(str(text))
        except (ValueError, TypeError) as error:
            raise NoticeError(f"no time: {clip(text)!r}") from error
    try:
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError) as error:
        raise NoticeError(f"no time: {clip(text)!r}") from error


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
