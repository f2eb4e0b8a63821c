"""The ways back: quarantine until the causes are gone, probation with a probe and clean beats, health."""

from __future__ import annotations

from controller.core.jobs import offer_to_jobs
from controller.core.membership import jobs_seated_on
from controller.core.probes import overdue, start_probe, take_result
from controller.core.state import Probe
from controller.core.turn import Turn
from everstep.vocabulary import Action, Decision, Finding, FindingKind, JobState, NodeState, Severity
from everstep.wire.v1.training import ProbeFinished

PROBE_PASSED = "passed"
PROBE_SKIPPED = "skipped"
PARTNERS_CONSIDERED = 32
"""How many nodes are looked at for a probe's partner: a bound on the work, whatever the fleet's size."""


def set_state(turn: Turn, node: str, state: NodeState, sentence: str) -> None:
    """Moves a node to ``state``, for the reason in ``sentence``."""
    record = turn.state.nodes[node]
    record.state, record.since, record.sentence, record.trace = state, turn.now, sentence, turn.trace
    turn.node_changed(node)


def begin_quarantine(
    turn: Turn, node: str, sentence: str, causes: tuple[Finding, ...], *, action: Action, wait_s: float = 0.0
) -> None:
    """Out of every roster until ``causes`` clear, and ``wait_s`` and the least time have passed."""
    record = turn.state.nodes[node]
    set_state(turn, node, NodeState.QUARANTINED, sentence)
    record.causes = [finding.key for finding in causes]
    record.action = action
    record.returns_at = turn.now + max(wait_s, turn.policy.quarantine_min_s)
    record.probe, record.overruled = "", ""
    turn.wake(record.returns_at, "node", node)


def check_quarantine(turn: Turn, node: str) -> None:
    """Whether the way out is open: causes cleared, time served, nobody's word needed."""
    record = turn.state.nodes[node]
    standing = {**record.findings, **record.own}
    causes = [key for key in record.causes if key in standing]
    if causes != record.causes:
        record.causes = causes
        turn.node_changed(node)
    if causes or record.needs_operator or not record.reachable:
        return
    if turn.now < record.returns_at:
        turn.wake(record.returns_at, "node", node)
        return
    begin_probation(turn, node, f"what sent {node} into quarantine has cleared")


def begin_probation(turn: Turn, node: str, because: str) -> None:
    """The last stretch: a probe with a healthy partner, and clean heartbeats."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    record.causes, record.action, record.probe, record.returns_at = [], Action.NONE, "", 0.0
    live.pulse.beats = 0
    sentence = f"{because}; on probation for {turn.policy.probation_beats} clean beats"
    set_state(turn, node, NodeState.PROBATION, sentence)
    turn.audit("node.probation", sentence, node=node)
    _next_probe(turn, node)
    check_probation(turn, node)


def _next_probe(turn: Turn, node: str) -> None:
    record = turn.state.nodes[node]
    if not turn.policy.probe_required:
        record.probe = PROBE_SKIPPED
        return
    partner = _partner(turn, node)
    if partner is None:
        record.probe = PROBE_SKIPPED
        turn.audit("probe.skipped", f"no healthy partner to probe {node} with: clean beats must do", node=node)
        return
    record.probe = start_probe(turn, (partner, node), candidate=node)


def _partner(turn: Turn, node: str) -> str | None:
    """A healthy node, an idle one before a busy one, another one after each failure."""
    state = turn.state
    choice: dict[str, bool] = {}
    for other, record in list(state.nodes.items())[:PARTNERS_CONSIDERED]:
        if other != node and record.state is NodeState.HEALTHY and other in state.reachable:
            choice[other] = any(job.state is JobState.RUNNING for job in jobs_seated_on(state, other))
    ordered = sorted(choice, key=lambda other: choice[other])
    return ordered[state.nodes[node].probe_failures % len(ordered)] if ordered else None


def probe_reported(turn: Turn, node: str, report: ProbeFinished) -> None:
    """One side's result; the last one, or the first bad one, decides about the candidate."""
    _conclude(turn, report.probe, take_result(turn, node, report))


def check_probe(turn: Turn, name: str) -> None:
    """At a probe's deadline."""
    _conclude(turn, name, overdue(turn, name))


def _conclude(turn: Turn, name: str, result: tuple[Probe, str] | None) -> None:
    if result is None or result[0].candidate is None:
        return
    candidate, failure = result[0].candidate, result[1]
    record = turn.state.nodes[candidate]
    if record.probe != name or record.state is not NodeState.PROBATION:
        return
    if failure:
        _probe_failed(turn, candidate, failure)
        return
    record.probe, record.probe_failures = PROBE_PASSED, 0
    turn.node_changed(candidate)
    check_probation(turn, candidate)


def _probe_failed(turn: Turn, node: str, failure: str) -> None:
    """Back into quarantine; the probe is tried again, with another partner, after a wait that doubles each time."""
    record, policy = turn.state.nodes[node], turn.policy
    record.probe_failures += 1
    wait_s = min(policy.probe_retry_max_s, policy.probe_retry_s * 2.0 ** min(record.probe_failures - 1, 30))
    finding = Finding(
        kind=FindingKind.PROBE_FAILED,
        subject="all-reduce",
        severity=Severity.CRITICAL,
        message=failure,
        since=turn.now,
        trace=turn.trace,
    )
    sentence = f"{failure}; {node} stays out, the next probe is in {wait_s:g} s or more"
    begin_quarantine(turn, node, sentence, (), action=Action.DRAIN, wait_s=wait_s)
    turn.verdict(node, Decision.QUARANTINE, sentence, action=Action.DRAIN, evidence=(finding,))


def check_probation(turn: Turn, node: str) -> None:
    """Whether the node is healthy: its probe passed, and enough clean beats since."""
    record = turn.state.nodes[node]
    if record.state is not NodeState.PROBATION or record.probe not in (PROBE_PASSED, PROBE_SKIPPED):
        return
    beats = turn.pulse(node).beats
    if beats < turn.policy.probation_beats or not record.reachable:
        return
    probe = "passed its probe and" if record.probe == PROBE_PASSED else "had no partner to be probed with, but"
    sentence = f"{node} {probe} sent {beats} clean beats: it is healthy"
    set_state(turn, node, NodeState.HEALTHY, sentence)
    turn.verdict(node, Decision.READMIT, sentence)
    offer_to_jobs(turn, node)
