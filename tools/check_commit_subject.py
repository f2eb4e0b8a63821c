#!/usr/bin/env python3
"""Check the subject line of a commit message: `area: verb object`, at most 72 characters.

Git calls this as a commit-msg hook with the path of the message file. Exit status 1 refuses the commit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
FORM = re.compile(r"[a-z0-9][a-z0-9_.,/ -]*: [a-z]\S*( \S+)+")
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")  # git writes these itself


def problem(message: str) -> str:
    """Say what is wrong with a commit message.

    Args:
        message: The whole message. Lines that start with ``#`` are comments, as git writes them.

    Returns:
        One sentence for the author, or an empty string where the subject is fine.
    """
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = next((line.rstrip() for line in lines if line.strip()), "")
    if subject.startswith(GENERATED):
        return ""
    if not subject:
        return "the commit message is empty"
    if len(subject) > MOST_CHARACTERS:
        return f"the subject has {len(subject)} characters, at most {MOST_CHARACTERS} fit: {subject}"
    if not FORM.fullmatch(subject):
        return f"write the subject as 'area: verb object', such as 'vault: hash copies in one pass', not: {subject}"
    if subject.endswith("."):
        return f"the subject ends with a full stop: {subject}"
    return ""


def main(arguments: list[str]) -> int:
    """Check the message file that git names, and print what is wrong."""
    why = problem(Path(arguments[0]).read_text(encoding="utf-8"))
    if why:
        print(why, file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
