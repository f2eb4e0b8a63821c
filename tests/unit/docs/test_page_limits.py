"""Pages have at most 400 lines of at most 120 characters, code and tables included; long addresses may exceed it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted([*DOCS.glob("index.md"), *DOCS.glob("*/**/*.md")])
LINES, CHARACTERS = 400, 120


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_page_is_short_enough(page: Path) -> None:
    lines = page.read_text().splitlines()
    long = [line for line in lines if len(re.sub(r"https?://[^\s)]+", "", line)) > CHARACTERS]
    assert long == []
    assert len(lines) <= LINES
