"""What the agent finds about itself. Facts in, findings out; no clocks, no I/O."""

from __future__ import annotations

from collections import deque

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity

SKEW_SAMPLES = 16
"""Heartbeats among which the one with the shortest round trip tells the clocks' difference best."""


class SelfFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows of itself.

    ``vault_lost``: why the vault is away, empty while it serves; ``vault_lost_at`` since when (wall seconds).
    ``spool_dropped``: reports lost because the controller was away for too long; ``spool_since``: the first of them.
    """

    vault_lost: str = ""
    vault_lost_at: float = 0.0
    spool_dropped: int = 0
    spool_since: float = 0.0


def assess(facts: SelfFacts) -> tuple[Finding, ...]:
    """The findings that follow from ``facts``."""
    found = (_vault(facts), _spool(facts))
    return tuple(finding for finding in found if finding is not None)


def _vault(facts: SelfFacts) -> Finding | None:
    if not facts.vault_lost:
        return None
    return Finding(
        kind=FindingKind.VAULT_LOST,
        subject="vault",
        severity=Severity.CRITICAL,
        message=f"this node keeps no checkpoints now: {facts.vault_lost}; it is being started again",
        action=Action.NONE,
        mode=Mode.RECOMMEND,
        rule="agent-vault-lost",
        source="the supervisor's own child",
        since=facts.vault_lost_at,
    )


def _spool(facts: SelfFacts) -> Finding | None:
    if not facts.spool_dropped:
        return None
    return Finding(
        kind=FindingKind.AGENT_OVERFLOW,
        subject="spool",
        severity=Severity.WARNING,
        message=f"{facts.spool_dropped} reports were lost while no controller answered; "
        "the oldest checkpoint reports went first: raise --spool-reports, or look after the controller",
        mode=Mode.OBSERVE,
        rule="agent-spool-overflow",
        source="--spool-reports and --spool-bytes",
        value=float(facts.spool_dropped),
        since=facts.spool_since,
    )


class SkewEstimate:
    """This clock against the controller's, from heartbeats: the answer's time is taken for the middle of the trip."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SKEW_SAMPLES)

    def heard(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        """An answer written at ``server_at`` (their clock) came at ``received_at`` (ours) after ``round_trip_s``."""
        skew_s = received_at - round_trip_s / 2 - server_at
        if self._samples and abs(skew_s - self._samples[-1][1]) > 1.0:
            self._samples.clear()  # one of the clocks was set: what came before says nothing now
        self._samples.append((round_trip_s, skew_s))

    @property
    def skew_s(self) -> float | None:
        """Seconds that this clock is ahead for certain: what half a round trip can explain counts as 0.

        From the quickest of the late round trips; None before the first.
        """
        if not self._samples:
            return None
        round_trip_s, skew_s = min(self._samples)
        return skew_s if abs(skew_s) > round_trip_s / 2 else 0.0
