"""How a daemon's log lines look: for people, or one JSON object a line for machines."""

from __future__ import annotations

import datetime
import logging
import sys

import msgspec

from everstep.plain_text import PlainLines

FIELDS = ("node", "job", "generation", "trace")
"""What a record may carry in ``extra`` so that a search by it finds the whole story."""


class TextLines(PlainLines):
    """Time, level, message, and the fields that are known."""

    def text(self, record: logging.LogRecord) -> str:
        known = [f"{name}={getattr(record, name)}" for name in FIELDS if getattr(record, name, None) not in (None, "")]
        line = super().text(record)
        return f"{line} [{' '.join(known)}]" if known else line


class JsonLines(logging.Formatter):
    """One JSON object: at (ISO 8601, UTC), level, logger, message, and the fields that are known."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_to_stderr(style: str, level: str) -> None:
    """Sends the whole process's log to stderr as ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
