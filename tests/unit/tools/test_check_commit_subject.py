"""The commit-msg hook accepts `area: verb object` and names what is wrong with anything else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[3] / "tools" / "check_commit_subject.py"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("vault: hash copies in one pass\n\nWhy: a second pass costs memory bandwidth.\n", ""),
        ("core, sim: move eviction into health\n", ""),
        ("Merge branch 'main' into topic\n", ""),
        ("# a comment first\ndocs: fix a link\n", ""),
        ("", "empty"),
        ("What is as slow at the next try is no hang\n", "area: verb object"),
        ("vault:hash copies\n", "area: verb object"),
        ("vault: hash copies.\n", "full stop"),
        ("vault: " + "hash " * 20 + "\n", "at most 72"),
    ],
)
def test_commit_subject_hook_checks_format(tmp_path: Path, message: str, complaint: str) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    ended = subprocess.run([HOOK, file], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, complaint in ended.stderr) == (1 if complaint else 0, True)
