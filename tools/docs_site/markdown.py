"""Write Markdown tables and turn docstrings into Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def from_docstring(text: str | None) -> str:
    """Return a docstring's text as Markdown: single backticks, no indentation."""
    lines = [line.strip() for line in (text or "").strip().splitlines()]
    return re.sub(r"``(.+?)``", r"`\1`", "\n".join(lines))


def cell(text: object) -> str:
    """Return text that stays inside one cell of a table."""
    return re.sub(r"\s*\n\s*", " ", str(text)).replace("|", r"\|").strip()


def code(text: object) -> str:
    """Return inline code, or nothing for an empty text."""
    plain = str(text).replace("\n", " ")
    fence = "``" if "`" in plain else "`"
    return f"{fence}{plain}{fence}" if plain else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; a heading that no row fills is left out."""
    cells = [[cell(value) for value in row] for row in rows]
    used = [column for column in range(len(headings)) if any(row[column] for row in cells)]
    lines = ["| " + " | ".join(headings[column] for column in used) + " |", "|" + "---|" * len(used)]
    lines += ["| " + " | ".join(row[column] for column in used) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """Return help text as a sentence: a capital at its beginning, a full stop at its end."""
    text = from_docstring(text)
    if not text:
        return ""
    first = text[0].upper() + text[1:]
    return first if first[-1] in ".!?:" else first + "."
