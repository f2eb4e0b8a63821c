"""Make log lines safe that others cause: bounded in number and length, and without control of a terminal."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from everstep.printable_text import escape_control, printable_json, valid_unicode

BURST = 10
PERIOD_S = 10.0
MAX_CHARACTERS = 500
"""Longest log message, which may quote what a stranger sent."""

SEARCH_FIELDS = ("node", "job", "generation", "trace")
"""Fields of a record's ``extra`` to search a log by."""


class LogThrottle:
    """Passes ``burst`` lines in each period, which begins with its first line, and counts the others. The first line
    after a period with dropped lines is preceded by their number. Safe from any thread."""

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float], *, burst: int = BURST) -> None:
        self._log = log
        self._monotonic = monotonic
        self._burst = burst
        self._lock = threading.Lock()
        self._ends_at = monotonic()
        self._said = self._left_out = 0

    def __call__(self, level: int, message: str, *args: object, extra: dict[str, Any] | None = None) -> None:
        """Log a line, shortened to MAX_CHARACTERS, or count it."""
        if not self._log.isEnabledFor(level):
            return
        with self._lock:
            now, left_out = self._monotonic(), 0
            if now >= self._ends_at:
                self._ends_at = now + PERIOD_S
                left_out, self._said, self._left_out = self._left_out, 0, 0
            if self._said >= self._burst:
                self._left_out += 1
                return
            self._said += 1
        if left_out:
            self._log.log(level, "%d lines like the next one were left out of the log", left_out, extra=extra)
        self._log.log(level, "%s", shortened(message % args), extra=extra)


def shortened(text: str) -> str:
    """Return a log message, cut to MAX_CHARACTERS."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, and loses what cannot be written, as to a file on a full disk: the program goes on.

    The first line after lost ones is preceded by their number and the reason.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lost = 0
        self._reason: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        try:
            lines = [self.format(record)]
            if self._lost:
                message, values = "%d lines before this one could not be written: %s", (self._lost, self._reason)
                notice = logging.LogRecord(__name__, logging.WARNING, "", 0, message, values, None)
                lines = ["", self.format(notice), *lines]  # the disk may have taken a part of a lost line
            self.stream.write("".join(line + self.terminator for line in lines))
            self.flush()
            self._lost = 0
        except OSError as error:
            self._lost, self._reason = self._lost + 1, error
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)


class SafeFormatter(logging.Formatter):
    """Formats lines for a terminal, without control characters in received text."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


class PlainLineFormatter(logging.Formatter):
    """Formats time, level and message for a terminal. Further lines of a message are indented, so they cannot pose as
    ours."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(self.text(record)).replace("\n", "\n  ")

    def text(self, record: logging.LogRecord) -> str:
        """Return the text to show."""
        return super().format(record)


class JsonLineFormatter(logging.Formatter):
    """One JSON object: at (ISO 8601, UTC), level, logger, message, and the fields that are set."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = valid_unicode(record.getMessage())
        line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": message}
        line |= {name: getattr(record, name) for name in SEARCH_FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = valid_unicode(self.formatException(record.exc_info))
        return printable_json(line)
