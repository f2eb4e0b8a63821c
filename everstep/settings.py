"""Load TOML files into structs, with errors that name the line, the key and the nearest known key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.errors import ConfigurationError

# ---- settings from environment variables: misspelt ones are reported, not ignored

_SERVICE_LINK = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a service with the prefix as its name."""


def unknown_variables(
    names: Iterable[str], prefix: str, known: Collection[str], others: Collection[str] = ()
) -> list[str]:
    """Return variables with ``prefix`` that are no settings: neither ``known`` nor ``others``. All are whole names."""
    ours = (name for name in names if name.startswith(prefix) and name not in known and name not in others)
    return sorted(name for name in ours if _SERVICE_LINK.fullmatch(name.removeprefix(prefix)) is None)


T = TypeVar("T")

_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_WHERE = re.compile(r" - at `\$([^`]*)`")
_TABLE_OF_MANY = re.compile(r"^\.([A-Za-z0-9_]+)\[(\d+)\]")


def load_toml(path: Path, kind: type[T], known: Iterable[type[msgspec.Struct]] = ()) -> T:
    """Load the file at ``path`` as a ``kind``.

    Args:
        path: The TOML file.
        kind: Type of the result.
        known: Structs that can occur inside ``kind``, whose fields are suggested for a misspelt key.

    Raises:
        ConfigurationError: The file cannot be read or does not fit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    return parse_toml(text, str(path), kind, known)


def parse_toml(text: str, name: str, kind: type[T], known: Iterable[type[msgspec.Struct]] = ()) -> T:
    """Return ``text`` as a ``kind``; errors call it ``name``. Raises ConfigurationError."""
    try:
        return msgspec.convert(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name}: not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name}{_line(text, str(error))}: {explain_error(error, known)}") from error


def explain_error(error: msgspec.ValidationError, known: Iterable[type[msgspec.Struct]]) -> str:
    """Return the message of a failed conversion, with the nearest known key for a misspelt one."""
    message = str(error)
    unknown = _UNKNOWN.search(message)
    if unknown is None:
        return message
    fields = {field.encode_name for struct in known for field in msgspec.structs.fields(struct)}
    near = difflib.get_close_matches(unknown[1], fields, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(sorted(fields))}"
    return f"unknown key `{unknown[1]}`{_describe_location(message)}; {hint}"


def _describe_location(message: str) -> str:
    where = _WHERE.search(message)
    return f" in {where[1].lstrip('.')}" if where and where[1] else ""


def _line(text: str, message: str) -> str:
    """Return `` line N`` of the key that ``message`` is about, as far as the text tells."""
    where = _WHERE.search(message)
    path = where[1] if where else ""
    unknown = _UNKNOWN.search(message)
    key = unknown[1] if unknown else path.rpartition(".")[2].partition("[")[0]
    lines = text.splitlines()
    table = _TABLE_OF_MANY.match(path)
    start = _header_line(lines, table[1], int(table[2])) if table else 0
    pattern = re.compile(rf"^\s*\[*\s*(?:[A-Za-z0-9_.]+\.)?{re.escape(key)}\s*[=\]]") if key else None
    for number in range(start, len(lines)):
        if pattern is not None and pattern.match(lines[number]):
            return f" line {number + 1}"
    return f" line {start + 1}" if table else ""


def _header_line(lines: list[str], table: str, index: int) -> int:
    headers = [n for n, line in enumerate(lines) if re.match(rf"^\s*\[\[\s*{re.escape(table)}\s*\]\]", line)]
    return headers[index] if index < len(headers) else 0
