"""What is remembered of a node beside the audit log: enough for whoever has to mend it."""

from __future__ import annotations

from controller.core.records import NodeRecord, Note

MOST_NOTES = 48
"""Entries kept of a node; older ones are in the audit log."""


def enter(record: NodeRecord, at: float, what: str, sentence: str, detail: dict[str, str] | None = None) -> None:
    """One more entry. The caller says that the record has changed."""
    note = Note(at=at, what=what, sentence=sentence, detail=detail or {})
    record.notes = [*record.notes[1 - MOST_NOTES :], note]
