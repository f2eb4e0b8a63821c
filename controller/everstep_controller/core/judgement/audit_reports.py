"""Report what audits find where nothing else follows: in jobs whose audits only report, and between kinds of nodes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.ids import GenerationNumber
from everstep.vocabulary import FindingKind, Mode, Severity
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.checkpoints.commits import KindPair
from everstep_controller.core.judgement import audits
from everstep_controller.core.records import MAX_AUDIT_NOTES, MAX_KIND_PAIRS, JobRecord
from everstep_controller.core.state import AuditCase
from everstep_controller.core.transition import Transition

REPORT_SUBJECT = "reported"
"""Subject of the finding on a node whose results differ in a job whose audits only report."""
REPORT_KEY = f"{FindingKind.AUDIT_MISMATCH}/{REPORT_SUBJECT}"
ONLY_REPORTED = (
    "the audits of this job only report, so nothing is undone and no node leaves (--sdc-mode enforce acts on it)"
)


def report_difference(
    transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.AuditJudgement
) -> None:
    """Report a difference by a finding on the node that the judgement speaks against, and by an event.

    A node that was reported before, or that two others refute, has a critical finding: a person should look at it. A
    suspicion and a difference without a culprit are events only.
    """
    if isinstance(judgement, audits.Incomparable):
        note_incomparable(transition, job, case, judgement)
        return
    rank = None if isinstance(judgement, audits.Suspicion) else audits.accused_rank(judgement, case.key.owner)
    node = None if rank is None else case.spec.node_of(rank)
    record = None if node is None else transition.state.nodes.get(node)
    if node is None or record is None:
        _report_event(transition, job, case, judgement.sentence, None)
        return
    standing = record.health.controller_findings.get(REPORT_KEY)
    again = standing is not None and standing.evidence.get("step") != str(case.key.step)
    is_proven = isinstance(judgement, audits.OwnerConvicted) or getattr(judgement, "strikes", 1) > 1
    severity = Severity.CRITICAL if again or is_proven else Severity.WARNING
    evidence = audits.collect_statements(case, job.job)
    finding = transition.make_finding(
        FindingKind.AUDIT_MISMATCH, REPORT_SUBJECT, severity, judgement.sentence, evidence=evidence
    )
    lasts_s = transition.policy.audits.strike_window_s
    if standing is not None and standing.severity.gravity >= severity.gravity:
        transition.extend_finding(node, REPORT_KEY, lasts_s)
        return
    finding = msgspec.structs.replace(finding, mode=Mode.OBSERVE)
    transition.raise_finding(node, finding, lasts_s)
    _report_event(transition, job, case, judgement.sentence, node)


def _report_event(transition: Transition, job: JobRecord, case: AuditCase, sentence: str, node: str | None) -> None:
    """Record an event; of an audit that names no node, once in a while."""
    live = transition.state.job_runtime[job.job].audits
    coalesce_s = transition.policy.rules.default_rule(FindingKind.AUDIT_MISMATCH).coalesce_s
    if node is None and transition.now < live.reported_at + coalesce_s:
        return
    if node is None:
        live.reported_at = transition.now
    job.audits.reports = [*job.audits.reports, sentence][-MAX_AUDIT_NOTES:]
    transition.mark_job_changed(job.job)
    words = f"{sentence}; {ONLY_REPORTED}"
    transition.log_event("audit.reported", words, node=node, job=job.job, generation=case.key.generation)


def note_incomparable(transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.Incomparable) -> None:
    """Say once which kinds of nodes are not compared."""
    words = f"audit {case.key.audit}: {judgement.sentence}"
    _note_kinds(transition, job, case.key.generation, judgement.kinds, judgement.sentence, words)


def note_incomparable_digests(
    transition: Transition, job: JobRecord, spec: GenerationSpec, pairs: Iterable[KindPair]
) -> None:
    """Say once for each two kinds of ranks that their digests differ and are not compared."""
    for pair in pairs:
        one, other = map(spec.node_of, pair.ranks)
        sentence = audits.describe_incomparable(one, other, pair.kinds)
        words = f"digests of parameters: {sentence}. Replicas that round differently drift apart"
        _note_kinds(transition, job, spec.number, pair.kinds, sentence, words)


def _note_kinds(
    transition: Transition, job: JobRecord, generation: GenerationNumber, kinds: tuple[str, str], note: str, words: str
) -> None:
    pair, known = " / ".join(sorted(kinds)), job.audits.not_compared
    if pair in known or len(known) >= MAX_KIND_PAIRS:
        return
    known[pair] = note
    transition.mark_job_changed(job.job)
    transition.log_event(
        "audit.not_compared", f"{words}. No node is accused for it", job=job.job, generation=generation
    )
