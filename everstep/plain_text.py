"""Make text from other machines safe to show: it must neither control a terminal nor forge a line."""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    """Replace control characters, and those that change the direction of writing; newlines stay."""
    return _CONTROL.sub("\ufffd", text)


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
