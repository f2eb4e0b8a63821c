"""Evict nodes on evidence, within budgets, and never below a job's minimum.

A deferred eviction is stored with the scope that defers it (``state.ScopeKind``). When the scope changes, the findings
that then stand are judged again; nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from everstep.vocabulary import Action, Decision, Finding, NodeState
from everstep_controller.core.health import offences, outbreaks
from everstep_controller.core.health.quarantine import begin_probation, begin_quarantine
from everstep_controller.core.policy import VerdictRule
from everstep_controller.core.records import Eviction, JobRecord, NodeRecord, ReadmissionPlan, UndecidedReason
from everstep_controller.core.seats.membership import jobs_seated_on, next_seats
from everstep_controller.core.state import DeadlineKind, FleetState, ScopeKind
from everstep_controller.core.transition import Transition, defer_judgement

# Budget: the number of nodes that the controller may evict within one window, from the fleet, a rack or a job.
#
# The fleet's budget latches: more evictions suggest a pattern that a person should look at first. Beyond the budgets of
# racks and jobs, evictions wait until the window has passed. Operators' evictions neither need nor use a budget.


class EvictionScope(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction budget of the fleet, of one rack or of one job."""

    kind: ScopeKind
    name: str
    """Name of the rack or job; empty for the fleet."""
    limit: int
    """Evictions allowed in a window."""
    used: int
    node_count: int
    """Number of nodes to which the share applies."""
    next_free_at: float = 0.0
    """Time at which the oldest eviction leaves the window; 0.0 if there is none."""

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def id(self) -> str:
        return self.kind.scope(self.name)

    def describe(self) -> str:
        """Return ``the fleet``, ``rack r1`` or ``job train``."""
        return f"{self.kind} {self.name}" if self.name else f"the {self.kind}"


def eviction_scopes(state: FleetState, now: float) -> tuple[EvictionScope, ...]:
    """Return the budget of the fleet, and of every rack and job with evictions in the window."""
    recent = recent_evictions(state, now)
    racks = dict.fromkeys(eviction.rack for eviction in recent if eviction.rack)
    jobs = dict.fromkeys(name for eviction in recent for name in eviction.jobs)
    return (
        fleet_scope(state, now),
        *(rack_scope(state, rack, now) for rack in racks),
        *(job_scope(state, job, now) for job in jobs),
    )


def budget_left(state: FleetState, now: float) -> int:
    """Return the number of evictions that the fleet's budget still allows; 0 while the breaker is latched."""
    return 0 if state.fleet.breaker_reason else fleet_scope(state, now).remaining


def recent_evictions(state: FleetState, now: float) -> list[Eviction]:
    """Return the evictions in the window that ends at ``now``, oldest first."""
    since = now - state.policy.budget.window_s
    return [eviction for eviction in state.fleet.recent_evictions if eviction.evicted_at > since]


def scopes_of(state: FleetState, node: str, now: float) -> Iterator[EvictionScope]:
    """Yield every budget, except the fleet's, that the node's eviction would use."""
    rack = state.nodes[node].identity.domain.rack
    if rack:
        yield rack_scope(state, rack, now)
    for job in jobs_seated_on(state, node):
        if job.is_running:
            yield job_scope(state, job.job, now)


def fleet_scope(state: FleetState, now: float) -> EvictionScope:
    """Return the fleet's budget."""
    policy, used = state.policy, recent_evictions(state, now)
    return _scope(state, ScopeKind.FLEET, "", policy.budget.count, policy.budget.share, len(state.nodes), used)


def rack_scope(state: FleetState, rack: str, now: float) -> EvictionScope:
    """Return a rack's budget. Its share applies to the rack's reachable nodes, evicted ones included."""
    policy, silence_count = state.policy, state.liveness.silence_counts.get(f"rack:{rack}")
    used = [eviction for eviction in recent_evictions(state, now) if eviction.rack == rack]
    of = silence_count.expected if silence_count is not None else 0
    return _scope(state, ScopeKind.RACK, rack, policy.budget.rack_count, policy.budget.rack_share, of, used)


def job_scope(state: FleetState, job: str, now: float) -> EvictionScope:
    """Return a job's budget. Its share applies to the nodes that the job has and those that it lost to evictions."""
    policy, record = state.policy, state.jobs.get(job)
    used = [eviction for eviction in recent_evictions(state, now) if job in eviction.jobs]
    of = len(record.seats) + len(used) if record is not None else 0
    return _scope(state, ScopeKind.JOB, job, policy.budget.job_count, policy.budget.job_share, of, used)


def _scope(
    state: FleetState, kind: ScopeKind, name: str, count: int, share: float, of: int, used: list[Eviction]
) -> EvictionScope:
    """Take the smaller of count and share, but at least 1, so that a sick node can leave a small fleet."""
    return EvictionScope(
        kind=kind,
        name=name,
        limit=max(1, min(count, int(share * of))),
        used=len(used),
        node_count=of,
        next_free_at=used[0].evicted_at + state.policy.budget.window_s if used else 0.0,
    )


BUDGET_SCOPES = (ScopeKind.RACK, ScopeKind.JOB, ScopeKind.SHARED)
"""Scopes that a returned eviction may free."""
MAX_EVICTION_TIMES = 64
"""Number of evictions remembered per node."""
SHORTAGE_CACHE_S = 0.25
"""Seconds for which a job's shortage of nodes is cached, so that many evictions at once do not each compute it."""
DEFERRAL_RECHECK_S = 5.0
"""Seconds after which a job that needed its nodes is checked again in any case."""


def evict(transition: Transition, node: str, finding: Finding, sentence: str) -> None:
    """Quarantine a serving node, with a verdict. The caller regroups the node's jobs."""
    record, trace = transition.state.nodes[node], finding.trace or transition.trace
    drop_deferral(transition, node)
    state = transition.state
    jobs = tuple(job.job for job in jobs_seated_on(state, node) if job.is_running)
    rack = record.identity.domain.rack
    eviction = Eviction(evicted_at=transition.now, node=node, rack=rack, jobs=jobs)
    state.fleet.recent_evictions = [*recent_evictions(state, transition.now), eviction]
    transition.mark_fleet_changed()
    words = f"{sentence}; evicted"
    if finding.kind in outbreaks.NOT_SELF_CLEARING:
        words += ", until an operator readmits it or the hardware is replaced"
    record.quarantine.needs_operator = False
    action = Action.strongest(Action.DRAIN if finding.action is Action.NONE else finding.action)
    begin_quarantine(transition, node, words, (finding,), action=action)
    if record.quarantine.plan is not None:
        record.quarantine.plan.evicted_at = transition.now
    record.history.eviction_times = [*record.history.eviction_times[1 - MAX_EVICTION_TIMES :], transition.now]
    action = record.quarantine.required_action
    transition.add_verdict(node, Decision.EVICT, words, action=action, evidence=(finding,), trace=trace)


class Deferral(msgspec.Struct, frozen=True):
    """A reason not to evict a node now."""

    scope: str
    reason: str
    again_at: float = 0.0
    """Time at which the scope has room again; 0.0 if no time is known."""
    trips_breaker: bool = False


def find_deferral(state: FleetState, node: str, finding: Finding, now: float) -> Deferral | None:
    """Return what defers the eviction for ``finding``; None if it may happen.

    Racks, jobs and minima come first, because what they defer does not use the fleet's budget. An eviction beyond that
    budget latches the breaker, unless other nodes show the finding: that may be an outbreak, which needs no person.
    """
    if state.fleet.breaker_reason:
        return Deferral(ScopeKind.FLEET.scope(), state.fleet.breaker_reason)
    if state.database.outage:
        why = f"the database is unavailable ({state.database.outage}), so an eviction could not be recorded"
        return Deferral(ScopeKind.DATABASE.scope(), why)
    for scope in scopes_of(state, node, now):
        if not scope.remaining:
            return _budget_used_up(state, scope, scope.id)
    for job in jobs_seated_on(state, node):
        if job.is_running and (why := _shortage(state, job, node, now)):
            return Deferral(ScopeKind.NEEDED.scope(job.job), why)
    scope = fleet_scope(state, now)
    if scope.remaining:
        return None
    if shared := outbreaks.shared_by_other(state, node, finding, now):
        reason = f"; {shared}, so this may be an outbreak"
        return _budget_used_up(state, scope, ScopeKind.SHARED.scope(outbreaks.signature(finding)), reason)
    deferred_by = state.nodes[node].health.eviction_deferred_by
    if deferred_by and ScopeKind.of(deferred_by) is ScopeKind.SHARED:  # its further findings latch no breaker either
        return _budget_used_up(state, scope, deferred_by, f"; the eviction of {node} is already deferred")
    return Deferral(ScopeKind.FLEET.scope(), _describe_tripped_breaker(state, scope), trips_breaker=True)


def _budget_used_up(state: FleetState, scope: EvictionScope, deferred_by: str, detail: str = "") -> Deferral:
    budget = f"({_format_evictions(scope.limit)} in {state.policy.budget.window_s:g} s)"
    reason = f"{scope.describe()} has used up its eviction budget {budget}{detail}"
    return Deferral(deferred_by, reason, scope.next_free_at)


def describe_deferral(state: FleetState, record: NodeRecord, now: float) -> str:
    """Return what defers the node's eviction at present, as a clause."""
    scope = record.health.eviction_deferred_by
    name = scope.partition(":")[2]
    used_up = f"has used up its eviction budget ({{}} in {state.policy.budget.window_s:g} s)"
    match ScopeKind.of(scope):
        case ScopeKind.FLEET:
            return state.fleet.breaker_reason or "the fleet has used up its eviction budget"
        case ScopeKind.DATABASE:
            return "the database is unavailable, so an eviction could not be recorded"
        case ScopeKind.RACK:
            return f"rack {name} {used_up.format(_format_evictions(rack_scope(state, name, now).limit))}"
        case ScopeKind.JOB:
            return f"job {name} {used_up.format(_format_evictions(job_scope(state, name, now).limit))}"
        case ScopeKind.SHARED:
            return f"the fleet has used up its eviction budget, and other nodes show {name} too"
        case _:
            job = state.jobs.get(name)
            return (_below_minimum(state, job, record.node) if job is not None else "") or f"job {name} needs the node"


def _shortage(state: FleetState, job: JobRecord, node: str, now: float) -> str:
    until, why = state.evictions.node_shortages.get(job.job, (0.0, ""))
    return why if now < until else _below_minimum(state, job, node)


def _describe_tripped_breaker(state: FleetState, scope: EvictionScope) -> str:
    budget = f"{_format_evictions(scope.limit)} in {state.policy.budget.window_s:g} s"
    limits = f"at most {state.policy.budget.count}, and {state.policy.budget.share:.0%} of {scope.node_count} nodes"
    return (
        f"the fleet has used up its eviction budget of {budget} ({limits}); no node is evicted until an operator "
        "resets the breaker: everstep reset-breaker --reason WHY"
    )


def _format_evictions(count: int) -> str:
    return "1 eviction" if count == 1 else f"{count} evictions"


def find_job_short_of_nodes(state: FleetState, node: str) -> str:
    """Return which job would fall below its minimum without the node, as a sentence; "" if none would."""
    running = (job for job in jobs_seated_on(state, node) if job.is_running)
    return next((why for job in running if (why := _below_minimum(state, job, node))), "")


def _below_minimum(state: FleetState, job: JobRecord, node: str) -> str:
    left, least = len(next_seats(state, job, without={node})), job.min_seats
    return f"job {job.job} needs {least} nodes and {left} would be left" if left < least else ""


def defer(transition: Transition, node: str, finding: Finding, sentence: str, deferral: Deferral) -> None:
    """Store the deferral of an eviction, with a verdict: one finding deferred by one scope is reported once."""
    state, record, scope = transition.state, transition.state.nodes[node], deferral.scope
    if deferral.trips_breaker:
        state.fleet.breaker_reason = deferral.reason
        state.fleet.breaker_tripped_at, state.fleet.breaker_tripped_by = transition.now, (node, finding.key)
        transition.mark_fleet_changed()
        transition.log_event("fleet.breaker_tripped", deferral.reason)
    if deferral.again_at:
        transition.schedule(deferral.again_at, DeadlineKind.DEFERRED_EVICTIONS, scope)
    if ScopeKind.of(scope) is ScopeKind.NEEDED:
        _cache_shortage(state, scope.partition(":")[2], deferral.reason, transition.now)
    if (record.health.deferred_eviction_key, record.health.eviction_deferred_by) == (finding.key, scope):
        return
    drop_deferral(transition, node)
    record.health.deferred_eviction_key, record.health.eviction_deferred_by = finding.key, scope
    outbreaks.record_seen_at(transition, node, finding.key, outbreaks.signature(finding))
    if scope not in state.evictions.deferred and ScopeKind.of(scope) is ScopeKind.NEEDED:
        transition.schedule(transition.now + DEFERRAL_RECHECK_S, DeadlineKind.DEFERRED_EVICTIONS, scope)
    state.evictions.deferred.setdefault(scope, {})[node] = None
    transition.mark_node_changed(node)
    words, trace = f"{sentence}; not evicted: {deferral.reason}", finding.trace or transition.trace
    transition.add_verdict(
        node, Decision.DEFER_EVICTION, words, action=finding.action, evidence=(finding,), trace=trace
    )


def _cache_shortage(state: FleetState, job: str, reason: str, now: float) -> None:
    if now >= state.evictions.node_shortages.get(job, (0.0, ""))[0]:
        state.evictions.node_shortages[job] = (now + SHORTAGE_CACHE_S, reason)


def drop_deferral(transition: Transition, node: str) -> None:
    """Drop the node's deferred eviction, if any, because it is carried out or no longer wanted."""
    record = transition.state.nodes[node]
    scope = record.health.eviction_deferred_by
    record.health.deferred_eviction_key = record.health.eviction_deferred_by = ""
    nodes = transition.state.evictions.deferred.get(scope)
    if nodes is not None and node in nodes:
        del nodes[node]
        transition.deferral_dropped[node] = None
        transition.mark_node_changed(node)
        if not nodes:
            del transition.state.evictions.deferred[scope]


def reset_breaker(transition: Transition) -> None:
    """Allow evictions again, with a full budget; findings that stand are judged again."""
    transition.state.fleet.recent_evictions = []
    _reset_breaker(transition)
    for scope in transition.state.evictions.deferred:
        if ScopeKind.of(scope) in BUDGET_SCOPES:
            transition.freed_scopes[scope] = None


def uncount_eviction(transition: Transition, node: str, at: float) -> None:
    """Remove the node's eviction at ``at`` from the budgets; reset a breaker that would not have latched without it."""
    fleet = transition.state.fleet
    counted = [eviction for eviction in fleet.recent_evictions if (eviction.node, eviction.evicted_at) != (node, at)]
    if len(counted) == len(fleet.recent_evictions):
        return
    fleet.recent_evictions = counted
    transition.mark_fleet_changed()
    if fleet.breaker_reason and fleet_scope(transition.state, fleet.breaker_tripped_at).remaining:
        _reset_breaker(transition)
        sentence = "the breaker is reset: the eviction that tripped it is within the budget, because the eviction of "
        sentence += f"{node} was rolled back"
        transition.log_event("fleet.breaker_reset", sentence)


def drop_rolled_back_deferral(transition: Transition, node: str) -> None:
    """Drop the deferred eviction of a node that is not at fault, and reset a breaker that latched for it."""
    fleet, held = transition.state.fleet, (node, transition.state.nodes[node].health.deferred_eviction_key)
    drop_deferral(transition, node)
    if fleet.breaker_reason and fleet.breaker_tripped_by == held:
        _reset_breaker(transition)
        sentence = f"the breaker is reset: {node}, which tripped it, no longer needs to be evicted"
        transition.log_event("fleet.breaker_reset", sentence)


def _reset_breaker(transition: Transition) -> None:
    transition.state.fleet.breaker_reason, transition.state.fleet.breaker_tripped_by = "", ("", "")
    transition.mark_fleet_changed()
    transition.freed_scopes[ScopeKind.FLEET.scope()] = None


def reconsider_deferred_scope(transition: Transition, scope: str) -> None:
    """At a deadline, have the evictions of a scope tried again: its window has passed, or its job is asked again."""
    if scope in transition.state.evictions.deferred:
        transition.freed_scopes[scope] = None
        if ScopeKind.of(scope) is ScopeKind.NEEDED:
            transition.schedule(transition.now + DEFERRAL_RECHECK_S, DeadlineKind.DEFERRED_EVICTIONS, scope)


def pop_freed_scopes(transition: Transition) -> list[str]:
    """Return and clear the scopes that may no longer defer evictions after this event."""
    nodes, jobs = transition.changed_records()
    for job in _jobs_that_may_spare(transition, nodes, jobs):
        transition.state.evictions.node_shortages.pop(job, None)
        transition.freed_scopes[ScopeKind.NEEDED.scope(job)] = None
    for job in jobs:
        scope = ScopeKind.JOB.scope(job)
        record = transition.state.jobs[job]
        for node in transition.state.evictions.deferred.get(scope, ()):
            if not record.is_running or not record.is_seated(node):
                transition.freed_scopes[scope] = None
    freed = [scope for scope in transition.freed_scopes if scope in transition.state.evictions.deferred]
    transition.freed_scopes.clear()
    return freed


def _jobs_that_may_spare(transition: Transition, nodes: Iterable[str], jobs: Iterable[str]) -> list[str]:
    """Return the jobs that changed in this event, or have a launcher on a node that became healthy in it."""
    found = dict.fromkeys(jobs)
    for node in nodes:
        record = transition.state.nodes[node]
        if record.state is NodeState.HEALTHY and record.since == transition.now:
            found.update(transition.state.node_runtime[node].jobs)
    return [job for job in found if ScopeKind.NEEDED.scope(job) in transition.state.evictions.deferred]


def restore_deferral(state: FleetState, node: str) -> None:
    """Restore the deferral of a stored record."""
    health = state.nodes[node].health
    if health.deferred_eviction_key:
        scope = health.eviction_deferred_by or ScopeKind.DATABASE.scope()
        state.evictions.deferred.setdefault(scope, {})[node] = None


def schedule_deferral_checks(transition: Transition) -> None:
    """Schedule checks of restored deferrals for the time when nodes had a chance to be heard."""
    for scope in transition.state.evictions.deferred:
        if ScopeKind.of(scope) is not ScopeKind.FLEET:
            transition.schedule(transition.state.rejoin_window.ends_at, DeadlineKind.DEFERRED_EVICTIONS, scope)


# Rollback
#
# An eviction, or a quarantine before service, that came before an outbreak was recognised is rolled back entirely: its
# place in the budgets, its weight among offences and its ladder step. The node serves again after probation.


def roll_back_for_outbreak(
    transition: Transition, rule: VerdictRule, nodes: Iterable[str], name: str, why: str
) -> None:
    """Roll back what was decided against ``nodes`` before the outbreak ``name`` was recognised."""
    for node in nodes:
        _roll_back(transition, rule, node, name, why)


def defer_for_outbreak(transition: Transition, node: str, key: str, name: str, due: float) -> None:
    """Judge the finding ``key`` again at ``due``, when the outbreak may be over."""
    defer_judgement(transition, node, key, UndecidedReason.OUTBREAK, due)
    outbreaks.record_seen_at(transition, node, key, name)


def _roll_back(transition: Transition, rule: VerdictRule, node: str, name: str, reason: str) -> None:
    """Drop everything with that signature against the node, whether the node is out for it or only deferred."""
    record, due = transition.state.nodes[node], transition.now + rule.correlated_s
    findings = outbreaks.findings_with_signature(record, name)
    if any(finding.key == record.health.deferred_eviction_key for finding in findings):
        defer_for_outbreak(transition, node, record.health.deferred_eviction_key, name, due)
        drop_rolled_back_deferral(transition, node)
    plan = record.quarantine.plan
    if plan is None or transition.now > outbreaks.rollback_possible_until(record):
        return
    dropped = [key for key, sign in plan.cause_signatures.items() if sign == name]
    if not dropped or (record.quarantine.needs_operator and rule.kind not in outbreaks.NOT_SELF_CLEARING):
        return
    for key in dropped:
        del plan.cause_signatures[key]
        defer_for_outbreak(transition, node, key, name, due)
    record.quarantine.causes = [key for key in record.quarantine.causes if key not in dropped]
    if not plan.cause_signatures:
        why = f"{reason}, which points to a cause outside the nodes"
        _roll_back_eviction(transition, node, plan, findings, why)


def withdraw_eviction(transition: Transition, node: str, key: str, reason: str) -> None:
    """Take back the eviction, standing or deferred, for a finding that was wrong, unless the node is out for others."""
    record = transition.state.nodes[node]
    if record.health.deferred_eviction_key == key:
        drop_rolled_back_deferral(transition, node)
    plan, finding = record.quarantine.plan, record.get_finding(key)
    if plan is None or plan.cause_signatures.pop(key, None) is None:
        return
    record.quarantine.causes = [cause for cause in record.quarantine.causes if cause != key]
    transition.mark_node_changed(node)
    if not plan.cause_signatures:
        _roll_back_eviction(transition, node, plan, [finding] if finding is not None else [], reason)


def _roll_back_eviction(
    transition: Transition, node: str, plan: ReadmissionPlan, findings: list[Finding], reason: str
) -> None:
    state, record, at = transition.state, transition.state.nodes[node], plan.evicted_at
    uncount_eviction(transition, node, at)
    what = "eviction" if at in record.history.eviction_times else "quarantine"
    record.history.eviction_times = [time for time in record.history.eviction_times if time != at]
    offences.withdraw_offence(transition, node, plan.offence_weight, at)
    record.history.ladder_steps = {
        rule: kept for rule, steps in record.history.ladder_steps.items() if (kept := [s for s in steps if s[0] < at])
    }
    record.quarantine.needs_operator, record.health.defective_gpus = False, []
    sentence = f"the {what} of {node} is rolled back: {reason}"
    transition.add_verdict(node, Decision.CORRELATED, sentence, evidence=tuple(findings))
    counts = "no longer counts against a budget" if what == "eviction" else "no longer counts as an offence"
    transition.log_event("node.eviction_rolled_back", f"the {what} of {node} {counts}", node=node)
    if record.state is NodeState.QUARANTINED and record.liveness.reachable:
        begin_probation(transition, node, sentence)
    elif record.state is NodeState.QUARANTINED:
        record.quarantine.earliest_end = transition.now  # probation begins once the node is heard
    for scope in state.evictions.deferred:
        if ScopeKind.of(scope) in BUDGET_SCOPES:
            transition.freed_scopes[scope] = None
