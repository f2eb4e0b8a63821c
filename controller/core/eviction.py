"""A node leaves the fleet: only on evidence, under a budget, and never below what a job needs."""

from __future__ import annotations

from controller.core.membership import jobs_seated_on, next_seats
from controller.core.quarantine import begin_quarantine
from controller.core.state import FleetState
from controller.core.turn import Turn
from everstep.vocabulary import Action, Decision, Finding, FindingKind, JobState, NodeState


def budget(state: FleetState) -> int:
    """Evictions that the window allows: by count and by share, and always one."""
    policy = state.policy
    return max(1, min(policy.eviction_count, int(policy.eviction_share * len(state.nodes))))


def budget_left(state: FleetState, now: float) -> int:
    """Evictions that the budget still allows at ``now``; none while the breaker is latched."""
    if state.fleet.breaker:
        return 0
    recent = sum(1 for at in state.fleet.evictions if at > now - state.policy.eviction_window_s)
    return max(0, budget(state) - recent)


def evict(turn: Turn, node: str, finding: Finding, sentence: str) -> bool:
    """Sends a serving node into quarantine, when minimum and budget allow; the verdict says which it was.

    A node that computed wrongly stays there until somebody vouches for it: no sensor will see it heal. The caller
    regroups the jobs that have seats on it.
    """
    trace = finding.trace or turn.trace
    needed = needed_by(turn.state, node)
    held = needed or _over_budget(turn)
    if held:
        if needed:
            turn.state.nodes[node].overruled = finding.key
            turn.state.overruled.add(node)
        words = f"{sentence}; not evicted: {held}"
        turn.verdict(node, Decision.HOLD_BY_BUDGET, words, action=finding.action, evidence=(finding,), trace=trace)
        return False
    record = turn.state.nodes[node]
    turn.state.fleet.evictions.append(turn.now)
    turn.fleet_changed()
    words, needs_operator = f"{sentence}; evicted", finding.kind is FindingKind.DIGEST_MISMATCH
    if needs_operator:
        words += ", until an operator readmits it or the hardware is replaced"
    begin_quarantine(turn, node, words, (finding,), action=_cure(finding), wait_s=_offender_wait_s(turn, node))
    record.evictions.append(turn.now)
    record.needs_operator = needs_operator
    if needs_operator:
        record.condemned = [gpu.uuid for gpu in record.gpus] or [node]
    turn.verdict(node, Decision.EVICT, words, action=record.action, evidence=(finding,), trace=trace)
    return True


def _cure(finding: Finding) -> Action:
    return Action.strongest(Action.DRAIN if finding.action is Action.NONE else finding.action)


def needed_by(state: FleetState, node: str) -> str:
    """Which job would fall below its minimum without the node, in words; empty where every job can spare it."""
    for job in jobs_seated_on(state, node):
        if job.state is not JobState.RUNNING:
            continue
        left = next_seats(state, job, without={node})
        if len(left) < job.spec.min_nodes:
            return f"job {job.job} needs {job.spec.min_nodes} nodes and {len(left)} would be left"
    return ""


def _over_budget(turn: Turn) -> str:
    fleet, policy = turn.state.fleet, turn.policy
    fleet.evictions = [at for at in fleet.evictions if at > turn.now - policy.eviction_window_s]
    if fleet.breaker:
        return fleet.breaker
    allowed = budget(turn.state)
    if len(fleet.evictions) < allowed:
        return ""
    fleet.breaker = (
        f"the budget of {allowed} eviction{'s' if allowed > 1 else ''} in {policy.eviction_window_s:g} s is used up "
        f"(at most {policy.eviction_count}, and {policy.eviction_share:.0%} of {len(turn.state.nodes)} nodes); "
        "no node is evicted until an operator resets the breaker"
    )
    fleet.breaker_at = turn.now
    turn.fleet_changed()
    turn.audit("fleet.breaker", fleet.breaker)
    return fleet.breaker


def _offender_wait_s(turn: Turn, node: str) -> float:
    record, policy = turn.state.nodes[node], turn.policy
    record.evictions = [at for at in record.evictions if at > turn.now - policy.offender_window_s]
    before = len(record.evictions)
    if before == 0:
        return 0.0
    return min(policy.offender_wait_max_s, policy.offender_wait_s * 2.0 ** min(before - 1, 30))


def serving(turn: Turn, node: str) -> bool:
    """Whether the node counts among those that can be evicted."""
    return turn.state.nodes[node].state in (NodeState.HEALTHY, NodeState.SUSPECT)
