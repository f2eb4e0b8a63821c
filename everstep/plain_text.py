"""What others said, as it may be shown: a text from another machine must neither steer a terminal nor forge a line."""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    """Control characters, and those that turn the direction of writing, are shown as such; the ends of lines stay."""
    return _CONTROL.sub("\ufffd", text)


class PlainLineFormatter(logging.Formatter):
    """Time, level and message, for a terminal. Whatever is in a message, a line that is not indented is ours."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(self.text(record)).replace("\n", "\n  ")

    def text(self, record: logging.LogRecord) -> str:
        """What is to be shown."""
        return super().format(record)
