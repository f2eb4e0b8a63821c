"""Make text of other machines harmless where it is printed: it must neither control a terminal nor forge a line."""

from __future__ import annotations

import re

import msgspec

_REORDERING = r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""Characters that change the direction of writing, and Unicode's ends of lines and paragraphs."""
_CONTROL = re.compile(rf"[\x00-\x09\x0b-\x1f\x7f-\x9f{_REORDERING}]")
_CONTROL_IN_JSON = re.compile(rf"[\x7f-\x9f{_REORDERING}]")  # encoders escape the characters below
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def escape_control(text: str) -> str:
    """Replace control characters, and those that change the direction of writing; newlines stay."""
    return _CONTROL.sub("\ufffd", text)


def valid_unicode(text: str) -> str:
    """Return text that UTF-8 can hold: bytes that Python kept as surrogates, as in a file name, are decoded again."""
    try:
        return text.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # a surrogate that no byte became
        return text.encode(errors="backslashreplace").decode()


def plain_line(line: str) -> str:
    """Return a line of a program's output without colours and tabs; other control characters are replaced."""
    return escape_control(_STYLE.sub("", line).expandtabs())


def printable_json(message: object, *, indent: int = 0) -> str:
    """Return a message in JSON for a terminal or a log: such characters are escaped, and a reader gets them back."""
    body = msgspec.json.encode(message)
    text = (msgspec.json.format(body, indent=indent) if indent else body).decode()
    return _CONTROL_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
