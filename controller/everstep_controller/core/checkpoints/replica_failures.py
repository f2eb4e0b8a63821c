"""Homes of copies that do not take them: after some versions that could not be committed for it, copies go elsewhere.

A vault without memory, one that is far too slow, or one between which and the sender bytes are garbled, does no harm to
training. But as long as a share's copy is its part, nothing is committed. Which of the two ends is at fault need not be
known to let another pair try: a node whose copies arrive nowhere is then seen at its next home too.
"""

from __future__ import annotations

from everstep.vocabulary import Finding, FindingKind, GenerationReason, JobState, Severity
from everstep_controller.core.health.evidence import raise_own
from everstep_controller.core.jobs.generations import Cause, boundary_step, placed, regroup
from everstep_controller.core.records import JobRecord
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named

SUBJECT = "copies"


def check_homes(turn: Turn, job: JobRecord) -> None:
    """At a deadline, or when a version could not be committed: homes that missed too many in a row are passed over."""
    live, policy, spec = turn.state.live_jobs[job.job], turn.policy, job.generation
    live.passed_over = {home: until for home, until in live.passed_over.items() if until > turn.now}
    failing = sorted(home for home, count in live.missed.items() if count >= policy.copy_misses)
    if not failing or spec is None or job.state is not JobState.RUNNING or turn.state.store_away:
        return
    if turn.now < job.opened_at + policy.growth_interval_s:
        turn.wake(job.opened_at + policy.growth_interval_s, "job", job.job)
        return
    if boundary_step(turn, job, live) is None:
        return  # the next version that is missed comes here again
    for home in failing:
        del live.missed[home]
        live.passed_over[home] = turn.now + policy.passed_over_s
        _name(turn, job, home)
    if placed(turn, job, list(spec.seats)) == spec.replica_nodes:
        return  # there is nobody else
    sentence = f"copies go elsewhere than to {named(failing)}, which missed {policy.copy_misses} versions in a row"
    regroup(turn, job, Cause(reason=GenerationReason.PLACEMENT, sentence=sentence, trace=turn.trace, boundary=True))


def _name(turn: Turn, job: JobRecord, home: str) -> None:
    spec = job.generation
    assert spec is not None
    senders = [node for node, homes in spec.replica_nodes.items() if home in homes]
    finding = Finding(
        kind=FindingKind.COPIES_MISSING,
        subject=f"{SUBJECT}/{job.job}",
        severity=Severity.WARNING,
        message=(
            f"{turn.policy.copy_misses} versions of {job.job} in a row did not get from {named(senders)} to {home}, "
            "so nothing was committed; the ranks' logs on either end say why (memory, time, digests)"
        ),
        value=float(turn.policy.copy_misses),
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, home, finding, turn.policy.passed_over_s)
