"""What a rank finds while it restores: bytes that are not what was written. They accuse no node by themselves."""

from __future__ import annotations

from everstep.clock import Clock
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised, GenerationSpec


def found_while_restoring(
    spec: GenerationSpec,
    clock: Clock,
    kind: FindingKind,
    subject: str,
    reason: str,
    *,
    instead: str,
    source: str,
    evidence: dict[str, str],
) -> FindingRaised:
    """A warning for the agent to pass on, under the generation's trace.

    Args:
        reason: what is wrong, in words; ``instead``: what is used in its place.
        source: by what it was seen.
    """
    finding = Finding(
        kind=kind,
        subject=subject,
        severity=Severity.WARNING,
        message=f"{reason}; found while restoring, {instead}",
        mode=Mode.OBSERVE,
        source=source,
        since=clock.wall(),
        trace=spec.trace,
        evidence=evidence,
    )
    return FindingRaised(finding=finding, job=spec.job)
