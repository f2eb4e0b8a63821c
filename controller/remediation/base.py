"""The seam to whatever drains and repairs machines."""

from __future__ import annotations

from typing import Protocol

from everstep.vocabulary import Decision, Verdict

ACTED_ON = frozenset({Decision.EVICT, Decision.RECOMMEND, Decision.QUARANTINE, Decision.READMIT, Decision.REPAIR})
"""Decisions that the outside is told of; the others change nothing there."""


class Remediation(Protocol):
    """Tells the outside about verdicts.

    Called in the event loop's thread after a verdict is durable; must return at once and never raise. Told at most
    once: what was not delivered when the controller ends is in the audit log, and is not told again.
    """

    def verdicts(self, verdicts: list[Verdict]) -> None:
        """New verdicts, in order."""

    def close(self) -> None:
        """No more verdicts come."""
