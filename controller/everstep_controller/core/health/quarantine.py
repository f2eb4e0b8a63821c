"""The ways back: quarantine until the causes are gone, probation with diagnostics and clean beats, health."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.clock import Backoff
from everstep.vocabulary import Action, Decision, Finding, FindingKind, NodeState, ProbeKind, Severity
from everstep_controller.core.health import diagnostics, evidence, remediation_ladder
from everstep_controller.core.health.diagnostics import Outcome, partner_for, start_probe
from everstep_controller.core.health.evidence import raise_own
from everstep_controller.core.health.node_state import kept_out, set_state
from everstep_controller.core.health.outbreaks import INCURABLE, convicts, signature, spared_of, standing_against
from everstep_controller.core.jobs.joining import offer_to_jobs
from everstep_controller.core.jobs.losses import forgive
from everstep_controller.core.jobs.membership import computes
from everstep_controller.core.policy import RUNGS, SecondPass, next_rung, remember_step
from everstep_controller.core.records import Course, NodeRecord
from everstep_controller.core.transition import Turn

__all__ = ["begin_probation", "begin_quarantine", "check_probation", "check_quarantine", "set_state"]

OF_RANKS = (str(FindingKind.RANK_FLAPPING), str(FindingKind.RANK_STRAGGLER))
"""What a node is blamed for by its job, and so what its job forgives."""
PROBE_PASSED = "passed"
PROBE_SKIPPED = "skipped"
PROBE_WAITS = "waiting"
"""For a partner, for a second pass, or to be tried again."""


# --- quarantine --------------------------------------------------------------------------------------------------


def begin_quarantine(
    turn: Turn,
    node: str,
    sentence: str,
    causes: tuple[Finding, ...],
    *,
    action: Action,
    wait_s: float = 0.0,
    offence: float = evidence.EVICTED,
) -> None:
    """Out of every roster until ``causes`` clear, and ``wait_s``, the least time and what offences cost have passed.

    The rules of the causes say what is done to it meanwhile, and what it has to pass before it serves again.
    """
    record = turn.state.nodes[node]
    if offence:
        evidence.offend(turn, node, offence)
    record.causes, record.cleared, record.action = [], {}, action
    record.course = _next_course(record.course, offence)
    for finding in causes:
        add_cause(turn, node, finding)
    set_state(turn, node, NodeState.QUARANTINED, sentence)
    served = evidence.wait_s(turn, node) if offence >= evidence.EVICTED else 0.0
    record.returns_at = turn.now + max(wait_s, served, turn.policy.quarantine_min_s)
    record.probe = ""
    turn.wake(record.returns_at, "node", node)
    turn.wake(turn.now, "care", node)


def _next_course(before: Course | None, offence: float) -> Course:
    """What was to be passed on a way back that ends here is to be passed on the next one. A reset or reboot that may
    still be carried out goes on in its place of its ladder: nothing else is asked for beside it."""
    course = Course(offence=offence)
    if before is not None:
        course.checks, course.passes = before.checks, before.passes
        if before.remedy:
            course.rule, course.ladder, course.rung = before.rule, before.ladder, before.rung
            course.remedy, course.remedy_due = before.remedy, before.remedy_due
    return course


def add_cause(turn: Turn, node: str, finding: Finding) -> None:
    """One more thing that must clear. The strongest cure of all causes is the one that is due."""
    record = turn.state.nodes[node]
    if finding.key in record.causes:
        return
    record.causes.append(finding.key)
    turn.node_changed(node)
    rule = turn.policy.rules.rule(finding)
    course = record.course = record.course or Course()
    if course.remedy and (course.rule, course.ladder) == (rule.id, rule.ladder):
        rung = course.rung  # what is under way for it has not been of no use yet
    else:
        rung = next_rung(rule, finding, record.steps.get(rule.id, []), turn.now)
    record.steps[rule.id] = remember_step(record.steps.get(rule.id, []), rule, rule.ladder[rung], turn.now)
    first = not course.rule
    stronger = not first and RUNGS.index(rule.ladder[rung]) > RUNGS.index(course.ladder[course.rung])
    if first or (stronger and not course.remedy):
        course.rule, course.ladder, course.rung, course.settles_at = rule.id, rule.ladder, rung, 0.0
        record.action = rule.ladder[rung]
    course.checks = tuple(dict.fromkeys([*course.checks, *rule.diagnostics]))
    course.passes, course.clear_s = max(course.passes, rule.passes), max(course.clear_s, rule.clear_s)
    course.signs[finding.key], course.reserve_s = signature(finding), max(course.reserve_s, rule.correlated_s)
    if finding.kind in INCURABLE:
        record.needs_operator, record.condemned = True, [gpu.uuid for gpu in record.gpus] or [node]


def check_quarantine(turn: Turn, node: str) -> None:
    """Whether the way out is open: causes clear for long enough, time served, nobody's word needed."""
    record = turn.state.nodes[node]
    if remediation_ladder.check_offences(turn, node):
        return
    causes = [key for key in record.causes if _stands(turn, record, key)]
    if causes != record.causes:
        record.causes = causes
        turn.node_changed(node)
    if causes or record.needs_operator:
        remediation_ladder.go_on(turn, node)
    elif record.reachable and turn.now < record.returns_at:
        turn.wake(record.returns_at, "node", node)
    elif record.reachable:
        begin_probation(turn, node, f"nothing stands against {node} any more")


def _stands(turn: Turn, record: NodeRecord, key: str) -> bool:
    if key in record.findings or key in record.own:
        return True
    due = record.cleared.get(key, 0.0) + (record.course.clear_s if record.course else 0.0)
    if turn.now < due:
        turn.wake(due, "care", record.node)
        return True
    record.cleared.pop(key, None)
    return False


# --- probation ---------------------------------------------------------------------------------------------------


def begin_probation(turn: Turn, node: str, because: str) -> None:
    """The last stretch: the diagnostics that its reason calls for, and clean beats. Never against somebody's word."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    record.causes, record.cleared, record.action, record.probe, record.returns_at = [], {}, Action.NONE, "", 0.0
    course = record.course = record.course or Course()
    if why := kept_out(record, turn.now):
        set_state(turn, node, NodeState.HELD, f"{because}; {why}")
        return
    live.pulse.beats = 0
    _check_all(course)
    sentence = f"{because}; on probation for {turn.policy.probation_beats} clean beats"
    set_state(turn, node, NodeState.PROBATION, sentence)
    turn.audit("node.probation", sentence, node=node)
    if not _unwell(turn, node):
        begin_checks(turn, node)


def _check_all(course: Course) -> None:
    course.left, course.alone = list(course.checks or (ProbeKind.ALL_REDUCE,)) * course.passes, False


def begin_checks(turn: Turn, node: str) -> None:
    """The diagnostics of a node on probation, from the first one on."""
    if turn.policy.probe_required:
        next_check(turn, node)
    else:
        turn.state.nodes[node].probe = PROBE_SKIPPED
    check_probation(turn, node)


def _unwell(turn: Turn, node: str) -> bool:
    """Whether something stands against a node on its way back: agents tell of it once, and it may have been out then.
    It is judged when all that this event tells is known (``pictures.judge_returning``)."""
    if not standing_against(turn.state, turn.state.nodes[node], turn.now):
        return False
    turn.returning[node] = None
    return True


def next_check(turn: Turn, node: str) -> None:
    """Runs the next diagnostic, where none is under way."""
    record = turn.state.nodes[node]
    course = record.course = record.course or Course()
    turn.node_changed(node)
    if course.left and course.left[0] is not ProbeKind.ALL_REDUCE:
        record.probe = start_probe(turn, (node,), candidate=node, kind=course.left[0])
        return
    if course.left:
        partner, busy = partner_for(turn, node, record.probe_failures)
        if partner is not None:
            record.probe = start_probe(turn, (partner, node), candidate=node)
            return
        if busy:
            record.probe = PROBE_WAITS
            turn.wake(turn.now + turn.policy.partner_wait_s, "care", node)
            return
        course.left, course.alone = [kind for kind in course.left if kind is not ProbeKind.ALL_REDUCE], True
        turn.audit("probe.skipped", f"no healthy partner to probe {node} with: clean beats must do", node=node)
        next_check(turn, node)
        return
    record.probe = PROBE_SKIPPED if course.alone else PROBE_PASSED


def may_be_tried(turn: Turn, node: str) -> bool:
    """Whether a node on probation waits for a partner, or for a time that has passed, and for nothing else."""
    record = turn.state.nodes[node]
    if record.state is not NodeState.PROBATION or record.probe != PROBE_WAITS:
        return False
    lately = any(finding.kind is FindingKind.PROBE_FAILED for finding in record.own.values())
    return not lately and not diagnostics.suspected(turn, node)


def examined(turn: Turn, outcome: Outcome) -> None:
    """A diagnostic of a node on its way back has ended."""
    node = outcome.probe.candidate
    if node is None or turn.state.nodes[node].probe != outcome.name:
        return
    if turn.state.nodes[node].state is not NodeState.PROBATION:
        return
    if not outcome.failure:
        passed(turn, node)
    elif outcome.unable == node:
        failed(turn, node, outcome.failure, offence=0.0)
    elif outcome.wrong and len(outcome.probe.nodes) == 1:
        _found_wrong(turn, node, outcome)
    elif len(outcome.probe.nodes) > 1:
        _ask_others(turn, node, outcome)
    else:
        failed(turn, node, outcome.failure)


def passed(turn: Turn, node: str) -> None:
    """One diagnostic less to go."""
    record = turn.state.nodes[node]
    if record.course is not None:
        record.course.left = record.course.left[1:]
    next_check(turn, node)
    if record.probe == PROBE_PASSED:
        record.probe_failures = 0
    check_probation(turn, node)


def _ask_others(turn: Turn, node: str, outcome: Outcome) -> None:
    """A pair failed: which of the two it was, partners known to be good will tell. One that could not run the probe is
    no suspect for that."""
    found = {
        suspect: Finding(
            kind=FindingKind.PROBE_FAILED,
            subject="all-reduce",
            severity=Severity.CRITICAL,
            message=outcome.failure,
            since=turn.now,
            trace=turn.trace,
        )
        for suspect in (node, *(other for other in outcome.probe.nodes if other not in (node, outcome.unable)))
    }
    if diagnostics.open_case(turn, SecondPass.PAIR, found, outcome.failure, unable=outcome.unable) is None:
        failed(turn, node, outcome.failure, offence=0.0 if outcome.unable else evidence.FAILED_PROBE)
    else:
        turn.state.nodes[node].probe = PROBE_WAITS
        turn.node_changed(node)


def failed(turn: Turn, node: str, failure: str, offence: float = evidence.FAILED_PROBE) -> None:
    """Back into quarantine; the diagnostics begin anew after a wait that doubles each time.

    One on which a job computes serves: to take it out would be an eviction, and that needs a proof, which this is not
    (``examinations`` and ``_found_wrong`` have those). It stays on probation, and is tried again as well.
    """
    record, policy = turn.state.nodes[node], turn.policy
    record.probe_failures += 1
    waits = Backoff(floor_s=policy.probe_retry_s, ceiling_s=policy.probe_retry_max_s)
    wait_s = waits.limit_s(record.probe_failures - 1)
    seated = computes(turn.state, node)
    finding = Finding(
        kind=FindingKind.PROBE_FAILED,
        subject="diagnostics",
        severity=Severity.WARNING if seated else Severity.CRITICAL,
        message=failure,
        since=turn.now,
        trace=turn.trace,
    )
    again = f"the next probe is in {wait_s:g} s or more"
    if seated:
        record.course = record.course or Course()
        _check_all(record.course)
        record.probe = PROBE_WAITS
        words = f"{failure}; a job computes on {node}, and nothing proves it ill: it stays on probation, {again}"
        turn.verdict(node, Decision.RECOMMEND, words, evidence=(finding,))
        raise_own(turn, node, finding, wait_s)
        return
    sentence = f"{failure}; {node} stays out, {again}"
    begin_quarantine(turn, node, sentence, (), action=Action.DRAIN, wait_s=wait_s, offence=offence)
    turn.verdict(node, Decision.QUARANTINE, sentence, action=Action.DRAIN, evidence=(finding,))
    raise_own(turn, node, finding, wait_s)


def _found_wrong(turn: Turn, node: str, outcome: Outcome) -> None:
    """Work whose result is known came out wrong. Where its rule does not convict, the node tries again all the same: it
    has not passed."""
    memory = outcome.probe.kind is ProbeKind.MEMORY
    finding = Finding(
        kind=FindingKind.MEMORY_WRONG if memory else FindingKind.COMPUTE_WRONG,
        subject=str(outcome.probe.kind),
        severity=Severity.CRITICAL,
        message=outcome.failure,
        action=Action.RESET_GPU if memory else Action.REPAIR,
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, node, finding)
    if not convicts(turn.state, turn.state.nodes[node], finding, turn.now):
        failed(turn, node, outcome.failure)
    elif not computes(turn.state, node):  # else it is judged as any of those is that a job computes on
        relapse(turn, node, finding, f"{outcome.failure}; {node} stays out until it is mended")


def relapse(turn: Turn, node: str, finding: Finding, sentence: str) -> None:
    """Ill again on its way back: under reserve, as evictions are."""
    refuse(turn, node, finding, sentence, action=finding.action, offence=evidence.RELAPSED)


def refuse(turn: Turn, node: str, finding: Finding, sentence: str, *, action: Action, offence: float = 0.0) -> None:
    """Into quarantine before it served: that costs no budget, and is taken back where others show the same."""
    begin_quarantine(turn, node, sentence, (finding,), action=action, offence=offence)
    record = turn.state.nodes[node]
    if record.course is not None:
        record.course.evicted_at = turn.now
    turn.verdict(node, Decision.QUARANTINE, sentence, action=record.action, evidence=(finding,))


def _blamed_by(turn: Turn, node: str) -> Iterable[str]:
    """Jobs that do without a node which was out, and has passed its diagnostics, for what its ranks did."""
    course = turn.state.nodes[node].course
    return turn.state.live_nodes[node].jobs if course is not None and course.rule.startswith(OF_RANKS) else ()


def heard_on_probation(turn: Turn) -> None:
    """Looks at who was heard in this turn, now that all it tells is known: what tells of something grave is no clean
    beat."""
    for node in turn.proving:
        check_probation(turn, node)
    turn.proving.clear()


def check_probation(turn: Turn, node: str) -> None:
    """Whether the node is healthy: its diagnostics passed, and enough clean beats since it was let out.

    Not while a reset or reboot of it may still be carried out: each is reported when it has ended, however late.
    """
    record = turn.state.nodes[node]
    if record.state is not NodeState.PROBATION or record.probe not in (PROBE_PASSED, PROBE_SKIPPED):
        return
    if record.course is not None and record.course.remedy:
        return
    beats = turn.pulse(node).beats
    if beats < turn.policy.probation_beats or not record.reachable or _unwell(turn, node):
        return
    probe = "passed its probe and" if record.probe == PROBE_PASSED else "had no partner to be probed with, but"
    sentence = f"{node} {probe} sent {beats} clean beats: {_fitness(turn, node)}"
    for name in _blamed_by(turn, node):
        forgive(turn, name, node)
    set_state(turn, node, NodeState.HEALTHY, sentence)
    turn.verdict(node, Decision.READMIT, sentence)
    offer_to_jobs(turn, node)


def _fitness(turn: Turn, node: str) -> str:
    """What the node's sentence says of it once it serves again: an outbreak's finding may stand on it all the same."""
    spared = dict.fromkeys(signature(one) for one in spared_of(turn.state, turn.state.nodes[node]))
    if not spared:
        return "it is healthy"
    return f"it serves, although it shows {', '.join(spared)}, which is part of an outbreak"
