"""Page of scenario transcripts: every file in tests/scenarios, as an engineer on call reads it."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "tests" / "scenarios"


def page() -> str:
    """Return the page."""
    parts = [
        "# Scenario transcripts\n\nEach incident is played by a test, and every line below is compared with what the "
        "decision core says. [Scenarios](scenarios.md) explains the form.\n"
    ]
    for path in sorted(_FOLDER.glob("*.txt")):
        prose, _, transcript = path.read_text().partition("\n\n")
        title = path.stem.replace("_", " ").capitalize()
        parts.append(f"## {title} {{ #{path.stem} }}\n\n{prose}\n\n```text\n{transcript.strip()}\n```\n")
    return "\n".join(parts)
