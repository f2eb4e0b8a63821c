"""Make a job's receipt: what failures cost, and what restarts from checkpoints would have cost.

This module has the only formula of these costs; the web page, the commands and the launcher ask for its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from everstep import __version__
from everstep.vocabulary import Decision, GenerationReason, JobState, Verdict
from everstep.wire.v1.operator import GenerationRecovery, JobAudits, JobDetail, ProgressSample
from everstep.wire.v1.operator_history import CheckpointCopy
from everstep.wire.v1.receipts import (
    RECEIPT_FORMAT,
    FailureCosts,
    JobReceipt,
    ReceiptEviction,
    ReceiptRecovery,
    ReceiptResult,
    WorldSize,
)

CHECKPOINT_INTERVAL_S = 1800.0
"""Interval of the checkpoints of the restarts that a run is compared with, unless a request names another."""
RESTART_S = 60.0
"""Seconds of such a restart: scheduling, imports, reading the checkpoint, the first step."""
LISTED_RECOVERIES = 200
LISTED_VERSIONS = 12
FAILURES = (
    GenerationReason.RANK_LOST,
    GenerationReason.RANK_HUNG,
    GenerationReason.NODE_LOST,
    GenerationReason.NODE_EVICTED,
    GenerationReason.CORRUPTION,
    GenerationReason.COLLECTIVE_FAILED,
    GenerationReason.STORE_LOST,
)
"""Reasons of regroups that a restart would have been needed for."""
JUDGEMENTS = (GenerationReason.NODE_EVICTED, GenerationReason.CORRUPTION)
"""Those that follow from a judgement, which may be taken back."""
EVICTIONS = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR)
"""Decisions after which a node leaves its job."""

ROLLED_BACK = " is rolled back: "
"""Part of the sentence of a verdict that takes an eviction back (``core.health.eviction``)."""

_RESULTS: dict[JobState, ReceiptResult] = {JobState.FINISHED: "finished", JobState.FAILED: "failed"}


class RestartModel(msgspec.Struct, frozen=True):
    """The restarts that a run is compared with."""

    checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S
    restart_s: float = RESTART_S

    def lost_s(self, running_s: float) -> float:
        """Return the seconds that a restart loses ``running_s`` after the first step, with the work it repeats."""
        return self.restart_s + running_s % self.checkpoint_interval_s


def repeated_steps(recovery: GenerationRecovery, samples: Sequence[ProgressSample]) -> int | None:
    """Return how many finished steps were computed again after a recovery; None if it is not known.

    A surviving rank knows its last finished step. Samples are up to a second old, and may not reach back.
    """
    if recovery.restored is not None and recovery.finished_step is not None:
        return max(0, recovery.finished_step - recovery.restored.step)
    if recovery.restored is None or not samples or samples[0].at > recovery.decided_at:
        return None
    # The newest, not the furthest: an earlier recovery may have gone back.
    newest = [sample.step for sample in samples if sample.at <= recovery.decided_at][-1]
    return max(0, newest - recovery.restored.step)


def mistaken_traces(evictions: Iterable[Verdict], later: Iterable[Verdict]) -> frozenset[str]:
    """Return the traces of the evictions (oldest first) that were rolled back by verdicts among ``later``."""
    given, mistaken = list(evictions), set[str]()
    for back in later:
        if ROLLED_BACK in back.sentence:
            before = [verdict for verdict in given if verdict.node == back.node and verdict.at <= back.at]
            mistaken |= {verdict.trace for verdict in before[-1:]}
    return frozenset(mistaken)


def first_step_at(created_at: float, recoveries: Iterable[GenerationRecovery]) -> float:
    """Return when the first generation began to step, from which on time counts as lost."""
    formed = next((recovery for recovery in recoveries if recovery.reason is GenerationReason.FORMED), None)
    return created_at if formed is None else formed.decided_at + (formed.duration_s or 0.0)


def priced_recoveries(
    recoveries: Iterable[GenerationRecovery],
    samples: Sequence[ProgressSample],
    *,
    began_at: float,
    ended_at: float,
    step_s: float,
    model: RestartModel,
    mistaken: frozenset[str] = frozenset(),
) -> Iterator[ReceiptRecovery]:
    """Yield each regroup after ``began_at`` with its costs. One that is not complete lasts until ``ended_at``.

    ``mistaken``: traces of evictions that were rolled back; no restart would have been needed for them.
    """
    for recovery in recoveries:
        if recovery.reason is GenerationReason.FORMED or recovery.decided_at < began_at:
            continue
        took_s = max(0.0, ended_at - recovery.decided_at) if recovery.duration_s is None else recovery.duration_s
        if recovery.after_step is not None and recovery.phases_s:  # until the boundary, the ranks trained
            took_s = min(took_s, sum(recovery.phases_s.values()))
        again = repeated_steps(recovery, samples)
        is_failure = recovery.reason in FAILURES and not (recovery.reason in JUDGEMENTS and recovery.trace in mistaken)
        yield ReceiptRecovery(
            generation=recovery.generation,
            reason=recovery.reason,
            sentence=recovery.sentence,
            decided_at=recovery.decided_at,
            ranks=recovery.world_size,
            trace=recovery.trace,
            duration_s=recovery.duration_s,
            restored=recovery.restored,
            phases_s=recovery.phases_s,
            repeated_steps=again,
            lost_s=took_s + (again or 0) * step_s,
            restart_lost_s=model.lost_s(recovery.decided_at - began_at) if is_failure else 0.0,
            is_failure=is_failure,
            after_step=recovery.after_step,
        )


def failure_costs(
    recoveries: Sequence[ReceiptRecovery], *, began_at: float, ended_at: float, model: RestartModel
) -> FailureCosts:
    """Return the sums over all recoveries, and the share of time that was not lost."""
    stepping_s = max(0.0, ended_at - began_at)
    lost_s = sum(recovery.lost_s for recovery in recoveries)
    return FailureCosts(
        checkpoint_interval_s=model.checkpoint_interval_s,
        restart_s=model.restart_s,
        stepping_s=stepping_s,
        lost_s=lost_s,
        lost_rank_s=sum(recovery.lost_s * recovery.ranks for recovery in recoveries),
        restart_lost_s=sum(recovery.restart_lost_s for recovery in recoveries),
        restart_lost_rank_s=sum(recovery.restart_lost_s * recovery.ranks for recovery in recoveries),
        effective_share=max(0.0, 1.0 - lost_s / stepping_s) if stepping_s else None,
    )


def world_sizes(recoveries: Iterable[GenerationRecovery]) -> Iterator[WorldSize]:
    """Yield the number of ranks wherever it changes."""
    last = 0
    for recovery in recoveries:
        if recovery.world_size and recovery.world_size != last:
            last = recovery.world_size
            yield WorldSize(at=recovery.decided_at, generation=recovery.generation, ranks=last)


def evictions(verdicts: Iterable[Verdict]) -> Iterator[ReceiptEviction]:
    """Yield the verdicts that removed a node, each with the rule and the finding that it rests on."""
    for verdict in verdicts:
        finding = next(
            (each for each in verdict.evidence if each.rule), verdict.evidence[0] if verdict.evidence else None
        )
        yield ReceiptEviction(
            node=verdict.node,
            decision=verdict.decision,
            at=verdict.at,
            sentence=verdict.sentence,
            rule="" if finding is None else finding.rule,
            evidence="" if finding is None else finding.message,
            verdict=verdict.id,
            trace=verdict.trace,
        )


def audit_notes(audits: JobAudits) -> Iterator[str]:
    """Yield what audits said that no eviction shows: withdrawn suspicions, reports, and audits that are off."""
    yield from audits.withdrawn
    yield from audits.reports
    yield from audits.off.values()
    if audits.voting_off_reason:
        yield audits.voting_off_reason
    yield from audits.not_compared


def make_receipt(
    detail: JobDetail,
    samples: Sequence[ProgressSample],
    verdicts: Iterable[Verdict],
    versions: Sequence[CheckpointCopy],
    *,
    until: float,
    gpus: int,
    model: RestartModel,
    mistaken: frozenset[str] = frozenset(),
) -> JobReceipt:
    """Return the receipt of a job as of ``until``, or of its end if that is earlier.

    Args:
        detail: The job, with its recoveries, oldest first.
        samples: Its progress, oldest first.
        verdicts: The verdicts that removed nodes from it, oldest first.
        versions: Versions that it could restore.
        until: Wall seconds; what was decided later is left out.
        gpus: Number of GPUs on its nodes.
        model: The restarts to compare with.
        mistaken: Traces of evictions that were rolled back.
    """
    job = detail.summary
    result = _RESULTS.get(job.state, "running")
    ended_at = until if result == "running" else min(detail.since, until)
    generations = [recovery for recovery in detail.recoveries if detail.created_at <= recovery.decided_at <= until]
    began_at = first_step_at(detail.created_at, generations)
    step_s = job.step_s or next((sample.step_s for sample in reversed(samples) if sample.step_s), 0.0)
    loss = (
        next((sample.loss for sample in reversed(samples) if sample.loss is not None), None)
        if job.loss is None
        else job.loss
    )
    priced = tuple(
        priced_recoveries(
            generations,
            samples,
            began_at=began_at,
            ended_at=ended_at,
            step_s=step_s,
            model=model,
            mistaken=mistaken,
        )
    )
    failures = sum(recovery.is_failure for recovery in priced)
    return JobReceipt(
        format=RECEIPT_FORMAT,
        job=job.job,
        result=result,
        sentence=job.reason,
        began_at=detail.created_at,
        ended_at=ended_at,
        costs=failure_costs(priced, began_at=began_at, ended_at=ended_at, model=model),
        steps=job.step,
        until_step=job.until_step,
        step_s=step_s,
        loss=loss,
        ranks=job.world_size,
        nodes=job.nodes,
        gpus=gpus,
        sizes=tuple(world_sizes(generations)),
        recovery_count=failures,
        other_regroups=len(priced) - failures,
        is_stopped=job.is_stopped,
        recoveries=priced[-LISTED_RECOVERIES:],
        evictions=tuple(evictions(verdicts)),
        audit_notes=tuple(audit_notes(detail.audits)),
        committed=job.committed,
        verified=job.verified,
        versions=tuple(versions[:LISTED_VERSIONS]),
        release=__version__,
    )
