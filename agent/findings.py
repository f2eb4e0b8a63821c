"""All findings of a node in one place, whoever found them, and which changes cannot wait for the next beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from everstep.vocabulary import Finding, Severity
from everstep.wire.v1.training import FindingCleared, FindingRaised

HELD_S = 600.0
"""How long a finding that is told once (a corrupt slot, a rank's word) stays in the picture after it was last told."""

MOST_HELD = 256

_ORDER = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


class FindingBoard:
    """The node's picture, from sources that say all they know (``replace``) and from single words (``hold``).

    Every critical finding has a trace from the moment it appears, so that what follows from it can be found.

    Args:
        new_trace: makes one.
    """

    def __init__(self, new_trace: Callable[[], str]) -> None:
        self._new_trace = new_trace
        self._sources: dict[str, tuple[Finding, ...]] = {}
        self._held: dict[str, tuple[float, FindingRaised]] = {}
        self._traces: dict[str, str] = {}
        self._picture: tuple[Finding, ...] = ()

    @property
    def picture(self) -> tuple[Finding, ...]:
        """Every finding that holds, one for each key, the worst where two sources say the same key."""
        return self._picture

    def replace(self, source: str, findings: Iterable[Finding]) -> list[FindingRaised | FindingCleared]:
        """``source`` knows these and no others; returns what must be told at once."""
        findings = tuple(findings)
        if self._sources.get(source, ()) == findings:
            return []
        self._sources[source] = findings
        return self._redraw()

    def hold(self, raised: FindingRaised, now: float) -> FindingRaised:
        """Keeps a finding that nobody will clear for HELD_S from ``now`` (monotonic); returns it with its trace.

        The caller tells it: it may belong to a job, which the picture does not say.
        """
        finding = self._traced(raised.finding)
        self._held[finding.key] = now, msgspec.structs.replace(raised, finding=finding)
        while len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]
        self._redraw()
        return self._held[finding.key][1]

    def expire(self, now: float) -> list[FindingRaised | FindingCleared]:
        """Lets go of what was held long enough; returns what must be told at once."""
        old = [key for key, (at, _) in self._held.items() if now - at >= HELD_S]
        for key in old:
            del self._held[key]
        return self._redraw() if old else []

    def _traced(self, finding: Finding) -> Finding:
        if finding.severity is not Severity.CRITICAL:
            return finding
        trace = finding.trace or self._traces.get(finding.key) or self._new_trace()
        self._traces[finding.key] = trace
        return finding if finding.trace else msgspec.structs.replace(finding, trace=trace)

    def _redraw(self) -> list[FindingRaised | FindingCleared]:
        drawn: dict[str, Finding] = {}
        held = tuple(raised.finding for _, raised in self._held.values())
        for findings in (*self._sources.values(), held):
            for finding in findings:
                other = drawn.get(finding.key)
                if other is None or _ORDER.index(finding.severity) > _ORDER.index(other.severity):
                    drawn[finding.key] = finding
        before = {f.key: f for f in self._picture if f.severity is Severity.CRITICAL}
        self._picture = tuple(self._traced(finding) for finding in drawn.values())
        critical = {f.key: f for f in self._picture if f.severity is Severity.CRITICAL}
        changes: list[FindingRaised | FindingCleared] = [
            FindingRaised(finding=finding) for key, finding in critical.items() if key not in before
        ]
        for key in before.keys() - critical.keys():
            changes.append(FindingCleared(key=key, trace=self._traces.pop(key, "")))
        return changes
