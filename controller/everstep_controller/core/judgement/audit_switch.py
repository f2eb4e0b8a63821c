"""Switch audits off that accuse the program's nodes for what the program does, and withdraw what they said."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.ids import GenerationNumber, NodeId, Rank, Version
from everstep.vocabulary import Finding, FindingKind
from everstep_controller.core.checkpoints.commits import AUDIT_CONVICTION_KEY
from everstep_controller.core.health.eviction import withdraw_eviction
from everstep_controller.core.records import MAX_AUDIT_NOTES, AuditStrike, JobRecord
from everstep_controller.core.state import AuditGroup
from everstep_controller.core.transition import Transition

STRIKE_SUBJECT = "strike"
"""Subject of the finding on a node whose result was wrong in an audit that alone does not convict it."""
STRIKE_KEY = f"{FindingKind.AUDIT_MISMATCH}/{STRIKE_SUBJECT}"


def switch_off(
    transition: Transition,
    job: JobRecord,
    group: AuditGroup,
    sentence: str,
    *,
    ranks: Collection[Rank] = (),
    cleared: str = "",
) -> None:
    """Switch an audit off for the rest of the job.

    The ranks learn it with the next generation. Until then their statements are not judged.

    Args:
        transition: The event.
        job: The job.
        group: The audit, with the step in which it differed.
        sentence: Why, in words for the script's author.
        ranks: The ranks on which it differed.
        cleared: Why what the audit said against nodes was wrong, which is then withdrawn; empty: it stands.
    """
    job.audits.off[group.audit] = sentence
    transition.mark_job_changed(job.job)
    live = transition.state.job_runtime[job.job].audits
    live.cases = {key: case for key, case in live.cases.items() if key.audit is not group.audit}
    data = {"audit": str(group.audit), "step": str(group.step), "ranks": ", ".join(map(str, sorted(ranks)))}
    transition.log_event("audit.switched_off", sentence, job=job.job, generation=group.generation, data=data)
    for node in list(transition.state.nodes) if cleared else ():
        _withdraw(transition, job, group, node, cleared)


def switch_votes_off(
    transition: Transition,
    job: JobRecord,
    version: Version | None,
    sentence: str,
    nodes: Sequence[NodeId],
    ranks: Collection[Rank] = (),
) -> None:
    """Compare digests of replicas no more in this job, which goes on. Its versions count as not verified.

    Args:
        transition: The event.
        job: The job.
        version: The version whose digests differ, if it is known.
        sentence: Why, in words for the script's author.
        nodes: Nodes that differ from each other; their ranks are to name the parameters that do.
        ranks: The ranks on which the digests differ.
    """
    job.audits.voting_off_reason, job.audits.compared_nodes = sentence, list(nodes)
    transition.mark_job_changed(job.job)
    data = {"audit": "digests", "version": str(version or ""), "ranks": ", ".join(map(str, sorted(ranks)))}
    transition.log_event("audit.switched_off", sentence, job=job.job, generation=job.progress.last_number, data=data)


def name_parameters(transition: Transition, job: JobRecord, version: Version, names: str) -> None:
    """Add the parameters that differ to the reason why digests are not compared any more."""
    words = f"these parameters differ between ranks at version {version}: {names}"
    job.audits.voting_off_reason, job.audits.compared_nodes = f"{job.audits.voting_off_reason}; {words}", []
    transition.mark_job_changed(job.job)
    data = {"audit": "digests", "version": str(version)}
    transition.log_event("audit.parameters_named", words, job=job.job, generation=version.generation, data=data)


def _withdraw(transition: Transition, job: JobRecord, group: AuditGroup, node: str, reason: str) -> None:
    """Withdraw the strikes that rest on an audit that is off, and an eviction that rests on them."""
    record = transition.state.nodes[node]
    kept = [strike for strike in record.audits.strikes if not _is_void(job, group, strike)]
    finding = record.health.controller_findings.get(AUDIT_CONVICTION_KEY)
    if len(kept) == len(record.audits.strikes) and not _rests_on_group(job, group, finding):
        return
    record.audits.strikes = kept
    transition.mark_node_changed(node)
    withdraw_suspicion(transition, job, node, reason, group.generation)
    if finding is not None and (finding.evidence.get("job"), finding.evidence.get("audit")) == (job.job, group.audit):
        withdraw_eviction(transition, node, AUDIT_CONVICTION_KEY, reason)
        transition.clear_findings(node, [AUDIT_CONVICTION_KEY], f"{node} is cleared: {reason}")
    if not kept:
        transition.clear_findings(node, [STRIKE_KEY], f"{node} is cleared: {reason}")


def _is_void(job: JobRecord, group: AuditGroup, strike: AuditStrike) -> bool:
    is_of_audit = (strike.job, strike.audit) == (job.job, group.audit)
    return is_of_audit and (strike.on_own_word or strike.generation == group.generation)


def _rests_on_group(job: JobRecord, group: AuditGroup, finding: Finding | None) -> bool:
    """Return whether a conviction rests on statements of this audit in this step."""
    said = (job.job, str(group.generation), str(group.step), str(group.audit))
    names = ("job", "generation", "step", "audit")
    return finding is not None and tuple(finding.evidence.get(name) for name in names) == said


def withdraw_suspicion(
    transition: Transition, job: JobRecord, node: str, reason: str, generation: GenerationNumber
) -> None:
    """Record that a suspicion against a node was withdrawn."""
    words = f"a suspicion against {node} was withdrawn: {reason}"
    job.audits.withdrawn = [*job.audits.withdrawn, words][-MAX_AUDIT_NOTES:]
    transition.mark_job_changed(job.job)
    transition.log_event("audit.suspicion_withdrawn", words, node=node, job=job.job, generation=generation)
