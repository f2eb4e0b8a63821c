"""Check that every transcript beside this file still ends in the decisions that it records.

EVERSTEP_REWRITE=1 writes them as they are today; the difference is for review.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.transcript import parsed, rewritten

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_decisions_match_the_record(path: Path) -> None:
    recorded = path.read_text()
    today = rewritten(recorded)
    if os.environ.get("EVERSTEP_REWRITE") == "1":
        path.write_text(today)
        return
    assert today == recorded


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_starts_with_a_short_explanation(path: Path) -> None:
    prose, commands = parsed(path.read_text())
    lines = prose.strip().splitlines()
    assert 3 <= len(lines) <= 8
    assert all(len(line) <= 128 for line in lines)
    assert commands
