"""Collect all findings of a node, and decide which changes cannot wait for the next heartbeat."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from everstep.vocabulary import Finding, FindingKind, Mode, Severity, gravest_by_key
from everstep.wire.v1.training import FindingCleared, FindingRaised

ONE_TIME_FINDING_S = 600.0
"""Seconds that a finding reported only once (a corrupt slot, a rank's report) stays among the findings."""

MAX_ONE_TIME_FINDINGS = 256


class NodeFindings:
    """The node's findings, from complete sources (``replace_source``) and from single reports (``add_one_time``). Every
    critical finding has a trace from its first appearance, so that its consequences can be found."""

    def __init__(self, new_trace_id: Callable[[], str]) -> None:
        self._new_trace_id = new_trace_id
        self._sources: dict[str, tuple[Finding, ...]] = {}
        self._one_time: dict[str, tuple[float, FindingRaised]] = {}
        self._traces: dict[str, str] = {}
        self.findings: tuple[Finding, ...] = ()
        """Every active finding, one for each key; the worst if two sources report the same key."""

    def replace_source(self, source: str, findings: Iterable[Finding]) -> list[FindingRaised | FindingCleared]:
        """Replace all findings of ``source``; return the changes to report at once."""
        findings = tuple(findings)
        if self._sources.get(source, ()) == findings:
            return []
        self._sources[source] = findings
        return self._rebuild()

    def add_one_time(self, raised: FindingRaised, now: float) -> FindingRaised:
        """Keep a finding that has no end of its own for ONE_TIME_FINDING_S from ``now`` (monotonic seconds).

        Returns the finding with its trace. The caller reports it, because it may belong to a job that ``findings`` does
        not name.
        """
        finding = self._with_trace(raised.finding)
        self._one_time[finding.key] = now, msgspec.structs.replace(raised, finding=finding)
        while len(self._one_time) > MAX_ONE_TIME_FINDINGS:
            del self._one_time[next(iter(self._one_time))]
        self._rebuild()
        return self._one_time[finding.key][1]

    def expire(self, now: float) -> list[FindingRaised | FindingCleared]:
        """Drop one-time findings that are old enough; return the changes to report at once."""
        old = [key for key, (at, _) in self._one_time.items() if now - at >= ONE_TIME_FINDING_S]
        for key in old:
            del self._one_time[key]
        return self._rebuild() if old else []

    def _with_trace(self, finding: Finding) -> Finding:
        if finding.severity is not Severity.CRITICAL:
            return finding
        trace = finding.trace or self._traces.get(finding.key) or self._new_trace_id()
        self._traces[finding.key] = trace
        return finding if finding.trace else msgspec.structs.replace(finding, trace=trace)

    def _rebuild(self) -> list[FindingRaised | FindingCleared]:
        one_time = (raised.finding for _, raised in self._one_time.values())
        worst = gravest_by_key(itertools.chain(*self._sources.values(), one_time))
        before = {f.key for f in self.findings if f.severity is Severity.CRITICAL}
        self.findings = tuple(self._with_trace(finding) for finding in worst.values())
        critical = {f.key: f for f in self.findings if f.severity is Severity.CRITICAL}
        raised = [FindingRaised(finding=finding) for key, finding in critical.items() if key not in before]
        over = before - critical.keys()
        return [*raised, *(FindingCleared(key=key, trace=self._traces.pop(key, "")) for key in over)]


# Findings about the agent itself. Pure: no clocks, no I/O.

MAX_SKEW_SAMPLES = 16
"""Heartbeats to choose from: the one with the shortest round trip measures the clocks' difference best."""


def find_agent_problems(vault_down_reason: str, vault_down_at: float, dropped: int, dropped_at: float) -> list[Finding]:
    """Return the findings about the agent itself: the vault is down since a wall time, reports were dropped from then
    on."""
    vault = Finding(
        kind=FindingKind.VAULT_LOST,
        subject="vault",
        severity=Severity.CRITICAL,
        message=f"this node stores no checkpoints: {vault_down_reason}; the vault is being restarted",
        mode=Mode.RECOMMEND,
        rule="agent-vault-lost",
        source="the supervisor",
        since=vault_down_at,
    )
    spool = Finding(
        kind=FindingKind.AGENT_SPOOL_OVERFLOW,
        subject="spool",
        severity=Severity.WARNING,
        message=f"{dropped} reports were dropped while no controller answered, the oldest checkpoint "
        "reports first: raise --spool-max-reports, or restore the controller",
        mode=Mode.OBSERVE,
        rule="agent-spool-overflow",
        source="--spool-max-reports and --spool-max-bytes",
        value=float(dropped),
        since=dropped_at,
    )
    return [finding for finding, is_active in ((vault, vault_down_reason), (spool, dropped)) if is_active]


class ClockSkewEstimate:
    """Estimate this clock's lead over the controller's; an answer's time counts as the middle of its round trip."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SKEW_SAMPLES)

    def add_sample(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        """Add an answer: ``server_at`` by the controller's clock, ``received_at`` by ours, after ``round_trip_s``."""
        skew_s = received_at - round_trip_s / 2 - server_at
        if self._samples and abs(skew_s - self._samples[-1][1]) > 1.0:
            self._samples.clear()  # a clock was set, so earlier samples are void
        self._samples.append((round_trip_s, skew_s))

    @property
    def skew_s(self) -> float | None:
        """Seconds that this clock is certainly ahead: a difference that half a round trip can explain counts as 0.
        Computed from the quickest recent round trip; None before the first."""
        if not self._samples:
            return None
        round_trip_s, skew_s = min(self._samples)
        return skew_s if abs(skew_s) > round_trip_s / 2 else 0.0
