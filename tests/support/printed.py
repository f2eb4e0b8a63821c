"""What the command line draws, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def printed(what: RenderableType, width: int) -> str:
    """The lines that a terminal of ``width`` columns shows, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
