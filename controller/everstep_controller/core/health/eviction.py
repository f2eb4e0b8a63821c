"""A node leaves the fleet: only on evidence, under a budget, and never below what a job needs.

What is held is kept with what holds it: the breaker (scope ``fleet``), a ``rack:``'s or ``job:``'s budget, the
fleet's where others show the same (``shared:``), the minimum of a job (``needed:``), or a database that is away
(``store``). When that changes, the findings that stand then are judged again; those that cleared meanwhile are not, and
no event of before is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from everstep.vocabulary import Action, Decision, Finding, JobState, NodeState
from everstep_controller.core.database_outage import STORE
from everstep_controller.core.health import evidence
from everstep_controller.core.health.outbreaks import (
    INCURABLE,
    UNDECIDED,
    correlated,
    date,
    shared,
    shown,
    signature,
    under_reserve_until,
)
from everstep_controller.core.health.quarantine import begin_probation, begin_quarantine
from everstep_controller.core.jobs.membership import (
    computes,
    is_seated,
    jobs_seated_on,
    least_nodes,
    next_seats,
    seats_of,
)
from everstep_controller.core.policy import Rule
from everstep_controller.core.records import Eviction, JobRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn, look_later

# ---- budget
# How many nodes may leave the fleet by the controller's own doing: of all, of one rack, of one job, in one window.
#
# The fleet's own budget latches: more convictions than that in a window are a pattern, and a person is to look at it
# before anybody else leaves. A rack's and a job's do not: they bound what one coincidence can cost, and further
# evictions
# wait until the window has passed. An operator's evictions need no budget and use none.

FLEET = "fleet"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """One budget: of the ``kind`` fleet, rack or job, with its ``name`` (empty: the fleet).

    ``limit`` evictions in a window, ``used`` and ``left`` of them now; ``of`` nodes that its share is taken of.
    ``frees_at``: when its oldest eviction leaves the window; 0.0 with none in it.
    """

    kind: str
    name: str
    limit: int
    used: int
    of: int
    frees_at: float = 0.0

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def in_words(self) -> str:
        """``the fleet``, ``rack r1``, ``job train``."""
        return f"{self.kind} {self.name}" if self.name else f"the {self.kind}"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget at one moment. ``breaker``: why nobody is evicted any more, since ``breaker_at``; empty while the
    fleet's budget was not exceeded. ``scopes``: the fleet, and every rack and job that used some of its own."""

    window_s: float
    breaker: str
    breaker_at: float
    scopes: tuple[Scope, ...]


def budget(state: FleetState, now: float) -> Budget:
    """What may still be evicted at ``now``."""
    recent = recent_evictions(state, now)
    racks = dict.fromkeys(eviction.rack for eviction in recent if eviction.rack)
    jobs = dict.fromkeys(name for eviction in recent for name in eviction.jobs)
    return Budget(
        window_s=state.policy.eviction_window_s,
        breaker=state.fleet.breaker,
        breaker_at=state.fleet.breaker_at if state.fleet.breaker else 0.0,
        scopes=(
            fleet_scope(state, now),
            *(rack_scope(state, rack, now) for rack in racks),
            *(job_scope(state, job, now) for job in jobs),
        ),
    )


def budget_left(state: FleetState, now: float) -> int:
    """Evictions that the fleet's budget still allows at ``now``; none while the breaker is latched."""
    return 0 if state.fleet.breaker else fleet_scope(state, now).left


def recent_evictions(state: FleetState, now: float) -> list[Eviction]:
    """The evictions inside the window that ends at ``now``, oldest first."""
    return [eviction for eviction in state.fleet.evicted if eviction.at > now - state.policy.eviction_window_s]


def scopes_of(state: FleetState, node: str, now: float) -> Iterator[Scope]:
    """Every budget but the fleet's that the node's eviction would count against."""
    rack = state.nodes[node].domain.rack
    if rack:
        yield rack_scope(state, rack, now)
    for job in jobs_seated_on(state, node):
        if job.state is JobState.RUNNING:
            yield job_scope(state, job.job, now)


def fleet_scope(state: FleetState, now: float) -> Scope:
    """The budget of all."""
    policy, used = state.policy, recent_evictions(state, now)
    return _scope(state, FLEET, "", policy.eviction_count, policy.eviction_share, len(state.nodes), used)


def rack_scope(state: FleetState, rack: str, now: float) -> Scope:
    """The budget of one rack: its share is of the nodes that are expected to be heard there, or were evicted."""
    policy, tally = state.policy, state.tallies.get(f"rack:{rack}")
    used = [eviction for eviction in recent_evictions(state, now) if eviction.rack == rack]
    of = tally.expected if tally is not None else 0
    return _scope(state, "rack", rack, policy.eviction_rack_count, policy.eviction_rack_share, of, used)


def job_scope(state: FleetState, job: str, now: float) -> Scope:
    """The budget of one job: its share is of the nodes that it has and those that it lost to evictions."""
    policy, record = state.policy, state.jobs.get(job)
    used = [eviction for eviction in recent_evictions(state, now) if job in eviction.jobs]
    of = len(seats_of(record.generation)) + len(used) if record is not None else 0
    return _scope(state, "job", job, policy.eviction_job_count, policy.eviction_job_share, of, used)


def _scope(state: FleetState, kind: str, name: str, count: int, share: float, of: int, used: list[Eviction]) -> Scope:
    """By count and by share, the smaller of both; and always one, or nothing sick could ever leave a small fleet."""
    return Scope(
        kind=kind,
        name=name,
        limit=max(1, min(count, int(share * of))),
        used=len(used),
        of=of,
        frees_at=used[0].at + state.policy.eviction_window_s if used else 0.0,
    )


NEEDED = "needed:"
SHARED = "shared:"
EVICTIONS_KEPT = 64
"""Of one node, for its history."""
SHORT_S = 0.25
"""Seconds that a job which could spare no node is taken to spare none: of hundreds convicted at once, few ask anew."""
AGAIN_S = 5.0
"""Seconds after which a job that needed its nodes is asked anew, whatever did or did not happen meanwhile."""


def evict(turn: Turn, node: str, finding: Finding, sentence: str) -> bool:
    """Sends a serving node into quarantine, when budgets and its jobs' minima allow; the verdict says which it was.

    A node that computed wrongly stays there until somebody vouches for it: no sensor will see it heal. The caller
    regroups the jobs that have seats on it.
    """
    trace = finding.trace or turn.trace
    scope, why = what_holds(turn, node, finding)
    if scope:
        if _hold(turn, node, finding, scope):
            words = f"{sentence}; not evicted: {why}"
            turn.verdict(node, Decision.HOLD_BY_BUDGET, words, action=finding.action, evidence=(finding,), trace=trace)
        return False
    record = turn.state.nodes[node]
    release(turn, node)
    _note_eviction(turn, node)
    words = f"{sentence}; evicted"
    if finding.kind in INCURABLE:
        words += ", until an operator readmits it or the hardware is replaced"
    record.needs_operator = False
    begin_quarantine(turn, node, words, (finding,), action=_cure(finding))
    if record.course is not None:
        record.course.evicted_at = turn.now
    record.evictions = [*record.evictions[1 - EVICTIONS_KEPT :], turn.now]
    turn.verdict(node, Decision.EVICT, words, action=record.action, evidence=(finding,), trace=trace)
    return True


def _cure(finding: Finding) -> Action:
    return Action.strongest(Action.DRAIN if finding.action is Action.NONE else finding.action)


def _note_eviction(turn: Turn, node: str) -> None:
    state, rack = turn.state, turn.state.nodes[node].domain.rack
    jobs = tuple(job.job for job in jobs_seated_on(state, node) if job.state is JobState.RUNNING)
    state.fleet.evicted = [*recent_evictions(state, turn.now), Eviction(at=turn.now, node=node, rack=rack, jobs=jobs)]
    turn.fleet_changed()


def serving(turn: Turn, node: str) -> bool:
    """Whether the node counts among those that can be evicted: one on probation too that kept its seat, having been
    only held, since a job computes on it."""
    state = turn.state.nodes[node].state
    if state is NodeState.PROBATION:
        return computes(turn.state, node)
    return state in (NodeState.HEALTHY, NodeState.SUSPECT)


# --- what speaks against it --------------------------------------------------------------------------------------


def what_holds(turn: Turn, node: str, finding: Finding) -> tuple[str, str]:
    """The scope that holds the node's eviction for ``finding`` now, and why in words; both empty where it may be
    carried out.

    Rack, jobs and their minima are asked before the fleet's budget: what they hold is no eviction that it would have
    to cover. Latches the breaker where that budget would be exceeded, unless others show the same: that may be an
    outbreak, which needs no person.
    """
    state = turn.state
    if state.fleet.breaker:
        return FLEET, state.fleet.breaker
    if state.store_away:
        return STORE, f"the database is away ({state.store_away}), so the eviction could be forgotten"
    for scope in scopes_of(state, node, turn.now):
        if not scope.left:
            return _used_up(turn, scope, scope.id)
    for job in jobs_seated_on(state, node):
        if job.state is JobState.RUNNING and (why := _shortage(state, job, node, turn.now)):
            return f"{NEEDED}{job.job}", why
    scope = fleet_scope(state, turn.now)
    if scope.left:
        return "", ""
    held_by, alike = _shared(turn, node, finding)
    return _used_up(turn, scope, held_by, alike) if held_by else (FLEET, _latch(turn, node, finding))


def _used_up(turn: Turn, scope: Scope, held_by: str, alike: str = "") -> tuple[str, str]:
    turn.wake(scope.frees_at, "held", held_by)
    words = f"its budget of {_evictions(scope.limit)} in {turn.policy.eviction_window_s:g} s"
    return held_by, f"{scope.in_words()} has used {words}{alike}"


def _shared(turn: Turn, node: str, finding: Finding) -> tuple[str, str]:
    """What holds a node whose finding others show too, and that in words; both empty where none does. Another finding
    of a node that is held so already is no other eviction."""
    if alike := shared(turn.state, node, finding, turn.now):
        return f"{SHARED}{signature(finding)}", f", and {alike}"
    held_by = turn.state.nodes[node].held_by
    return (held_by, f"; {node} is held already") if held_by.startswith(SHARED) else ("", "")


def _shortage(state: FleetState, job: JobRecord, node: str, now: float) -> str:
    until, why = state.short.get(job.job, (0.0, ""))
    if now >= until:
        why = _below_minimum(state, job, node)
        state.short[job.job] = (now + SHORT_S, why)
        if not why:
            del state.short[job.job]
    return why


def _latch(turn: Turn, node: str, finding: Finding) -> str:
    fleet, policy, scope = turn.state.fleet, turn.policy, fleet_scope(turn.state, turn.now)
    fleet.breaker = (
        f"the fleet's budget of {_evictions(scope.limit)} in {policy.eviction_window_s:g} s is used up "
        f"(at most {policy.eviction_count}, and {policy.eviction_share:.0%} of {scope.of} nodes); "
        "no node is evicted until an operator resets the breaker: everstep reset-breaker --reason WHY"
    )
    fleet.breaker_at, fleet.latched_by = turn.now, (node, finding.key)
    turn.fleet_changed()
    turn.audit("fleet.breaker", fleet.breaker)
    return fleet.breaker


def _evictions(count: int) -> str:
    return "1 eviction" if count == 1 else f"{count} evictions"


def needed_by(state: FleetState, node: str) -> str:
    """Which job would fall below its minimum without the node, in words; empty where every job can spare it."""
    running = (job for job in jobs_seated_on(state, node) if job.state is JobState.RUNNING)
    return next((why for job in running if (why := _below_minimum(state, job, node))), "")


def _below_minimum(state: FleetState, job: JobRecord, node: str) -> str:
    left, least = len(next_seats(state, job, without={node})), least_nodes(job)
    return f"job {job.job} needs {least} nodes and {left} would be left" if left < least else ""


# --- what is held ------------------------------------------------------------------------------------------------


def _hold(turn: Turn, node: str, finding: Finding, scope: str) -> bool:
    """Keeps the eviction for later; whether that is news: the same finding held by the same is said once."""
    record = turn.state.nodes[node]
    if (record.overruled, record.held_by) == (finding.key, scope):
        return False
    release(turn, node)
    record.overruled, record.held_by = finding.key, scope
    date(turn, node, finding.key, signature(finding))
    if scope not in turn.state.held and scope.startswith(NEEDED):
        turn.wake(turn.now + AGAIN_S, "held", scope)
    turn.state.held.setdefault(scope, {})[node] = None
    turn.node_changed(node)
    return True


def release(turn: Turn, node: str) -> None:
    """The node's held eviction, if there is one, is not wanted any more, or carried out now."""
    record = turn.state.nodes[node]
    scope, record.overruled, record.held_by = record.held_by, "", ""
    nodes = turn.state.held.get(scope)
    if nodes is not None and node in nodes:
        del nodes[node]
        turn.released[node] = None
        turn.node_changed(node)
        if not nodes:
            del turn.state.held[scope]


def reset_breaker(turn: Turn) -> None:
    """Evictions may happen again, with a whole budget; what stands now is judged anew."""
    turn.state.fleet.evicted = []
    _open_breaker(turn)
    for scope in turn.state.held:
        if not scope.startswith((NEEDED, STORE)):
            turn.freed[scope] = None


def take_back(turn: Turn, node: str, at: float) -> None:
    """The node's eviction ``at`` counts no more. A breaker that latched for one which the budget would have covered
    without it opens by itself."""
    fleet = turn.state.fleet
    counted = [one for one in fleet.evicted if (one.node, one.at) != (node, at)]
    if len(counted) == len(fleet.evicted):
        return
    fleet.evicted = counted
    turn.fleet_changed()
    if fleet.breaker and fleet_scope(turn.state, fleet.breaker_at).left:
        _open_breaker(turn)
        words = "the eviction that latched the breaker is within the budget"
        turn.audit("fleet.breaker_over", f"{words}, now that the one of {node} is taken back")


def release_acquitted(turn: Turn, node: str) -> None:
    """The node's held eviction is nobody's fault, and so is a breaker that latched for it."""
    fleet, held = turn.state.fleet, (node, turn.state.nodes[node].overruled)
    release(turn, node)
    if fleet.breaker and fleet.latched_by == held:
        _open_breaker(turn)
        turn.audit("fleet.breaker_over", f"the eviction of {node}, which latched the breaker, is not wanted any more")


def _open_breaker(turn: Turn) -> None:
    turn.state.fleet.breaker, turn.state.fleet.latched_by = "", ("", "")
    turn.fleet_changed()
    turn.freed[FLEET] = None


def check_held(turn: Turn, scope: str) -> None:
    """At a deadline: its window has passed, or a job is to be asked once more."""
    if scope in turn.state.held:
        turn.freed[scope] = None
        if scope.startswith(NEEDED):
            turn.wake(turn.now + AGAIN_S, "held", scope)


def freed_scopes(turn: Turn) -> list[str]:
    """What held evictions and may do so no more after this turn; each call forgets what it returned."""
    nodes, jobs = turn.changed()
    for job in _jobs_that_may_spare(turn, nodes, jobs):
        turn.state.short.pop(job, None)
        turn.freed[f"{NEEDED}{job}"] = None
    for job in jobs:
        if _has_left(turn.state, job, turn.state.held.get(f"job:{job}", ())):
            turn.freed[f"job:{job}"] = None
    freed = [scope for scope in turn.freed if scope in turn.state.held]
    turn.freed.clear()
    return freed


def _has_left(state: FleetState, name: str, held: Iterable[str]) -> bool:
    """Whether one of the nodes that the job's budget holds is not the job's any more."""
    job = state.jobs[name]
    return any(job.state is not JobState.RUNNING or not is_seated(job, node) for node in held)


def _jobs_that_may_spare(turn: Turn, nodes: Iterable[str], jobs: Iterable[str]) -> list[str]:
    """Jobs that changed in this turn, or whose launchers are on a node that became healthy in it."""
    found = dict.fromkeys(jobs)
    for node in nodes:
        record = turn.state.nodes[node]
        if record.state is NodeState.HEALTHY and record.since == turn.now:
            found.update(turn.state.live_nodes[node].jobs)
    return [job for job in found if f"{NEEDED}{job}" in turn.state.held]


def rehold(state: FleetState, node: str) -> None:
    """A stored record comes back: what was held still is."""
    record = state.nodes[node]
    if record.overruled:
        state.held.setdefault(record.held_by or STORE, {})[node] = None


def look_again(turn: Turn) -> None:
    """This controller begins: whatever is held will be looked at when nodes had time to be heard."""
    for scope in turn.state.held:
        if scope != FLEET:
            turn.wake(turn.state.reunion_at, "held", scope)


# ---- acquittals
# Whoever was convicted before an outbreak was recognised is acquitted: out by the same fault as everybody, and for it.
#
# An eviction is taken back whole: its place in the budgets, its weight among offences, its step of the ladder; and so
# is
# the quarantine of a node that was ill before it served. The node serves again by the way that leads back, on
# probation,
# since its jobs have gone on without it.


def spared(turn: Turn, rule: Rule, node: str, finding: Finding, *, anew: bool = True) -> str:
    """Whether the finding, which the node shows, or which is only looked at again (not ``anew``), is an outbreak's:
    why, in words, and it is judged later; empty elsewhere. Who was convicted before that was known is acquitted."""
    name = signature(finding)
    why, judged_before = correlated(turn, rule, node, finding, anew=anew)
    for other in judged_before:
        _acquit(turn, rule, other, name, why)
    if why:
        _wait(turn, node, finding.key, name, turn.now + rule.correlated_s)
    return why


def _wait(turn: Turn, node: str, key: str, name: str, due: float) -> None:
    look_later(turn, node, key, UNDECIDED, due)
    date(turn, node, key, name)


def _acquit(turn: Turn, rule: Rule, node: str, name: str, why: str) -> None:
    """Nothing of that signature counts against the node, whether it is out for it or only held."""
    record, due = turn.state.nodes[node], turn.now + rule.correlated_s
    findings = shown(record, name)
    if any(finding.key == record.overruled for finding in findings):
        _wait(turn, node, record.overruled, name, due)
        release_acquitted(turn, node)
    course = record.course
    if course is None or turn.now > under_reserve_until(record):
        return
    dropped = [key for key, sign in course.signs.items() if sign == name]
    if not dropped or (record.needs_operator and rule.kind not in INCURABLE):
        return
    for key in dropped:
        del course.signs[key]
        _wait(turn, node, key, name, due)
    record.causes = [key for key in record.causes if key not in dropped]
    if not course.signs:
        _take_back(turn, node, findings, f"{why}, which is no node's own")


def _take_back(turn: Turn, node: str, findings: list[Finding], why: str) -> None:
    state, record, course = turn.state, turn.state.nodes[node], turn.state.nodes[node].course
    at = course.evicted_at if course is not None else 0.0
    take_back(turn, node, at)
    what = "eviction" if at in record.evictions else "quarantine"
    record.evictions = [one for one in record.evictions if one != at]
    evidence.forgive(turn, node, course.offence if course is not None else 0.0, at)
    record.steps = {rule: kept for rule, steps in record.steps.items() if (kept := [s for s in steps if s[0] < at])}
    record.needs_operator, record.condemned = False, []
    sentence = f"the {what} of {node} is taken back: {why}"
    turn.verdict(node, Decision.CORRELATED, sentence, evidence=tuple(findings))
    counts = "counts against no budget" if what == "eviction" else "is no offence"
    turn.audit("node.acquitted", f"the {what} of {node} {counts} any more", node=node)
    if record.state is NodeState.QUARANTINED and record.reachable:
        begin_probation(turn, node, sentence)
    elif record.state is NodeState.QUARANTINED:
        record.returns_at = turn.now  # its way back opens when it is heard
    for scope in state.held:
        if scope != FLEET and not scope.startswith((NEEDED, STORE)):
            turn.freed[scope] = None
