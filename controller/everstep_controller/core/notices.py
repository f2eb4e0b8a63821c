"""Drain nodes that their provider is about to reclaim or to maintain, for as long as the notice stands.

A notice is a finding of the agent (``node.notice``), but no fault: it is neither judged nor counted, and uses no
eviction budget. A job that has enough other nodes leaves the node at the next step boundary. A job that needs the node
keeps it until another takes its place or the provider reclaims it, and its newest version goes to storage at once.
"""

from __future__ import annotations

import math

from everstep.vocabulary import Action, Finding, FindingKind, GenerationReason, Mode, NodeState
from everstep_controller.core.checkpoints.subscriptions import JobMilestone, publish
from everstep_controller.core.health.eviction import find_job_short_of_nodes
from everstep_controller.core.health.node_state import set_state
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.losses import regroup_jobs_without
from everstep_controller.core.maintenance import try_return_to_probation
from everstep_controller.core.records import IN_SERVICE, HistoryKind, NodeRecord
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.transition import Transition

RETRY_S = 2.0
"""Seconds between attempts to leave a node that a job still needs, or to drain one during a database outage."""


def reconsider_notice(transition: Transition, node: str) -> None:
    """Drain the node if a standing notice asks for it, and end that drain once none does."""
    record = transition.state.nodes[node]
    sentence, before = _drain_sentence(transition, record), record.scheduling.notice_reason
    if not sentence and not before:
        return
    if transition.state.database.outage:
        _retry_later(transition, node)
        return
    if sentence != before:
        record.scheduling.notice_reason = sentence
        transition.mark_node_changed(node)
    if not sentence:
        _end_drain(transition, node)
        return
    if not before:
        transition.log_event("node.notice", sentence, node=node)
        transition.append_history(node, HistoryKind.ACTION, sentence)
    if record.state in IN_SERVICE:
        set_state(transition, node, NodeState.HELD, sentence)
    if record.state is NodeState.HELD:
        _leave_jobs(transition, node, sentence, is_new=not before)


def _drain_sentence(transition: Transition, record: NodeRecord) -> str:
    """Return why a notice drains the node, as a sentence about the most urgent one; "" if none does."""
    asking = [f for f in record.health.agent_findings.values() if _asks_for_drain(transition, record, f)]
    if not asking:
        return ""
    first = min(asking, key=lambda finding: (math.inf if finding.value is None else finding.value, finding.key))
    return f"{record.node} is drained while a notice stands: {first.message}"


def _asks_for_drain(transition: Transition, record: NodeRecord, finding: Finding) -> bool:
    """Return whether the finding is a notice to act on. One that an operator accepted by a readmission is not."""
    if finding.kind is not FindingKind.NODE_NOTICE or finding.action is not Action.DRAIN:
        return False
    mode = transition.policy.rules.rule_for(finding).effective_mode(finding)
    return mode is Mode.ENFORCE and finding.key not in record.health.accepted_findings


def _leave_jobs(transition: Transition, node: str, sentence: str, *, is_new: bool) -> None:
    """Regroup the jobs without the node at a boundary. If one would have to pause, save it and try again later."""
    jobs = [job for job in jobs_seated_on(transition.state, node) if job.is_running]
    if not jobs:
        return
    shortage = find_job_short_of_nodes(transition.state, node)
    if not shortage:
        cause = RegroupCause(GenerationReason.OPERATOR, sentence, transition.trace, at_boundary=True)
        regroup_jobs_without(transition, node, cause)
        return
    if is_new:
        words = f"{node} keeps its seat until another node takes it or the provider reclaims {node}: {shortage}"
        transition.log_event("node.notice_waits", words, node=node)
        for job in jobs:
            publish(transition, job, JobMilestone.JOB_MAY_STOP)
    _retry_later(transition, node)


def _end_drain(transition: Transition, node: str) -> None:
    sentence = f"the notice for {node} was withdrawn or is over"
    transition.log_event("node.notice_ended", sentence, node=node)
    transition.append_history(node, HistoryKind.ACTION, sentence)
    try_return_to_probation(transition, node, sentence)


def _retry_later(transition: Transition, node: str) -> None:
    # rounding to whole seconds merges repeated requests into one check
    transition.schedule_treatment(math.floor(transition.now) + RETRY_S, node)
