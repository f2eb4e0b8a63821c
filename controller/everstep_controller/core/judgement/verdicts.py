"""Judge findings: compute one judgement from the rule, the outbreak, the ladder and the budgets, then carry it out.

``judge`` changes nothing. Before it, ``settle`` records the sighting, which may begin or end an outbreak.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, Mode, NodeState, Severity
from everstep_controller.core import policy
from everstep_controller.core.health import diagnostics, eviction, outbreaks
from everstep_controller.core.health.node_state import out_of_service_reason
from everstep_controller.core.health.quarantine import add_cause
from everstep_controller.core.jobs import losses, rank_restarts
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.policy import BlameIsolationMethod, VerdictRule
from everstep_controller.core.records import NodeRecord, UndecidedReason
from everstep_controller.core.seats.membership import is_computing
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition, defer_judgement

WRONG_RESULTS = (FindingKind.DIGEST_MISMATCH, FindingKind.AUDIT_MISMATCH, FindingKind.COMPUTE_WRONG)
"""Findings for which a job leaves the node at once: each further step would be wrong, too."""


class FindingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A standing finding that is to be judged now."""

    node: str
    finding: Finding
    count: int | None = None
    """Bad reports within the rule's window; None for a finding that is judged whatever their number."""
    is_new: bool = True
    """False for a finding that waited for the end of an outbreak and was not seen again."""
    is_logged: bool = True
    """False if no verdict is to be written: the kind flaps, or the finding was judged before."""
    proof: str = ""
    """Result of a blame isolation that names this node."""


class Response(Enum):
    """What follows from a judgement."""

    NOTHING = "nothing"
    ADVISE = "advise"
    """The rule takes no action: a person is told."""
    WAIT = "wait"
    """The finding is judged again later."""
    SPARE = "spare"
    """The finding belongs to an outbreak, and nothing happens to the node."""
    ADD_CAUSE = "add_cause"
    """The node is out already, and the finding must clear, too."""
    RECOMMEND = "recommend"
    RECOMMEND_TO_HOLDER = "recommend_to_holder"
    """An operator or another system has taken the node out, and decides about it."""
    RESTART_RANKS = "restart_ranks"
    TRY_PAIR = "try_pair"
    """Probes with healthy partners show which of two nodes is at fault."""
    EVICT = "evict"


class Postponement(msgspec.Struct, frozen=True):
    """Why, and until when, a finding is not judged."""

    reason: UndecidedReason
    due: float
    sentence: str = ""
    """Sentence for the event log; "" if none is written."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one report."""

    report: FindingReport
    rule: VerdictRule
    mode: Mode
    response: Response = Response.NOTHING
    action: Action = Action.NONE
    """Step of the rule's ladder that is due."""
    spared_by: str = ""
    """The outbreak to which the finding belongs."""
    deferred_by: Postponement | eviction.Deferral | None = None
    """What puts the response off: a ``Postponement`` for WAIT, a ``Deferral`` for EVICT."""
    is_repeated: bool = False
    """True if the step was just taken: the report is about the same fault."""
    restarts_used_up: bool = False
    """True if the node is evicted because its ranks were restarted too often."""

    def __post_init__(self) -> None:
        assert self.response is not Response.WAIT or isinstance(self.deferred_by, Postponement)
        assert self.response is not Response.SPARE or self.spared_by


def settle(transition: Transition, report: FindingReport) -> None:
    """Judge the report and carry out the judgement."""
    spared_by = ""
    if counts_as_sighting(transition.state, report, transition.now):
        if transition.state.nodes[report.node].state is NodeState.QUARANTINED:  # the verdict on its rollback says why
            report = msgspec.structs.replace(report, is_logged=False)
        spared_by = record_sighting(transition, report)
    _apply(transition, judge(transition.state, report, transition.now, spared_by))


def withhold_eviction(transition: Transition, report: FindingReport) -> bool:
    """Return whether an outbreak spares the node, after a verdict that says so."""
    spared_by = record_sighting(transition, report)
    if spared_by:
        _add_spared_verdict(transition, report, spared_by)
    return bool(spared_by)


def record_sighting(transition: Transition, report: FindingReport) -> str:
    """Return the outbreak to which the finding belongs ("" for none), after a rollback of nodes evicted for it."""
    node, finding, rule = report.node, report.finding, transition.policy.rules.rule_for(report.finding)
    why, judged_before = outbreaks.record_sighting(transition, rule, node, finding, is_new=report.is_new)
    if why:
        name = outbreaks.signature(finding)
        eviction.roll_back_for_outbreak(transition, rule, judged_before, name, why)
        eviction.defer_for_outbreak(transition, node, finding.key, name, transition.now + rule.correlated_s)
    return why


def settle_deferred_eviction(transition: Transition, report: FindingReport) -> None:
    """Evict the node, or defer its eviction again; its finding was judged before."""
    _apply(transition, judge_eviction(transition.state, report, transition.now))


def is_serving(state: FleetState, node: str) -> bool:
    """Return whether the node counts as evictable: in service, or on probation while a job computes on it."""
    node_state = state.nodes[node].state
    if node_state is NodeState.PROBATION:
        return is_computing(state, node)
    return node_state in (NodeState.HEALTHY, NodeState.SUSPECT)


def judge(state: FleetState, report: FindingReport, now: float, spared_by: str) -> Judgement:
    """Return the judgement of ``report``. ``spared_by`` is the outbreak to which the finding belongs; "" for none."""
    record, rule = state.nodes[report.node], state.policy.rules.rule_for(report.finding)
    mode = rule.effective_mode(report.finding)
    judged = Judgement(report=report, rule=rule, mode=mode)
    if _is_below_count(report, rule):
        return _respond(judged, Response.ADVISE if report.is_logged else Response.NOTHING)
    if _is_in_boot_grace(record, report, rule, now):
        return _postpone(judged, UndecidedReason.BOOT_GRACE, record.identity.booted_at + rule.boot_grace_s)
    if mode is Mode.OBSERVE:
        return judged
    if spared_by:
        return msgspec.structs.replace(judged, response=Response.SPARE, spared_by=spared_by)
    if record.state is NodeState.QUARANTINED:
        return _judge_quarantined(state, record, judged, now)
    action = outbreaks.due_action(record, rule, report.finding, now)
    if not _can_act_on(state, record, mode):
        ordered_out = record.scheduling.hold_reason or record.scheduling.external_cordon_by
        if mode is Mode.ENFORCE and report.is_logged and ordered_out:
            return _respond(judged, Response.RECOMMEND_TO_HOLDER, action=action)
        return judged
    if mode is Mode.RECOMMEND:
        repeated = _is_step_repeated(record, rule, action, now)
        return _respond(judged, Response.RECOMMEND, action=action, is_repeated=repeated)
    if action is Action.RESTART_RANK:
        return _judge_restart(state, record, judged, now)
    if rule.blame_isolation is BlameIsolationMethod.PAIR and not report.proof:
        return _respond(judged, Response.TRY_PAIR)
    return judge_eviction(state, report, now)


def counts_as_sighting(state: FleetState, report: FindingReport, now: float) -> bool:
    """Return whether the report counts towards an outbreak, and may be spared by one.

    On a quarantined node only reports just after its eviction do, since one fault raises several findings.
    """
    record, rule = state.nodes[report.node], state.policy.rules.rule_for(report.finding)
    mode = rule.effective_mode(report.finding)
    if mode is Mode.OBSERVE or _is_below_count(report, rule) or _is_in_boot_grace(record, report, rule, now):
        return False
    if record.state is NodeState.QUARANTINED:
        return mode is Mode.ENFORCE and _is_just_evicted(record, rule, now)
    if record.state is NodeState.PROBATION and mode is Mode.ENFORCE:
        return True
    return _can_act_on(state, record, mode)


def judge_eviction(
    state: FleetState,
    report: FindingReport,
    now: float,
    *,
    action: Action | None = None,
    restarts_used_up: bool = False,
) -> Judgement:
    """Return the eviction of the node, or what defers it. ``action`` is the step due; None for the ladder's next."""
    record, rule = state.nodes[report.node], state.policy.rules.rule_for(report.finding)
    return Judgement(
        report=report,
        rule=rule,
        mode=Mode.ENFORCE,
        response=Response.EVICT,
        action=outbreaks.due_action(record, rule, report.finding, now) if action is None else action,
        deferred_by=eviction.find_deferral(state, report.node, report.finding, now),
        restarts_used_up=restarts_used_up,
    )


def _respond(
    judged: Judgement, response: Response, *, action: Action = Action.NONE, is_repeated: bool = False
) -> Judgement:
    return msgspec.structs.replace(judged, response=response, action=action, is_repeated=is_repeated)


def _postpone(judged: Judgement, reason: UndecidedReason, due: float, sentence: str = "") -> Judgement:
    return msgspec.structs.replace(judged, response=Response.WAIT, deferred_by=Postponement(reason, due, sentence))


def _is_below_count(report: FindingReport, rule: VerdictRule) -> bool:
    """Return whether the rule takes no action on this report: handled elsewhere, mild, or too few of them."""
    if report.count is None:
        return False
    is_handled = bool(rule.already_handled) and rule.n_of_m[0] == 1
    return is_handled or not rule.counts_against_node(report.finding) or report.count < rule.n_of_m[0]


def _is_in_boot_grace(record: NodeRecord, report: FindingReport, rule: VerdictRule, now: float) -> bool:
    return report.count is not None and now < record.identity.booted_at + rule.boot_grace_s


def _is_just_evicted(record: NodeRecord, rule: VerdictRule, now: float) -> bool:
    return now < outbreaks.rollback_possible_until(record) and rule.blame_isolation is BlameIsolationMethod.NONE


def _can_act_on(state: FleetState, record: NodeRecord, mode: Mode) -> bool:
    """Return whether the node serves; advice is also given on a lost one."""
    return is_serving(state, record.node) or (mode is Mode.RECOMMEND and record.state is NodeState.LOST)


def _is_step_repeated(record: NodeRecord, rule: VerdictRule, action: Action, now: float) -> bool:
    return policy.was_step_taken(record.history.ladder_steps.get(rule.id, []), rule, action, now)


def _judge_quarantined(state: FleetState, record: NodeRecord, judged: Judgement, now: float) -> Judgement:
    """Add a cause to a node that is out, unless the finding belongs to an outbreak."""
    rule, node, finding = judged.rule, record.node, judged.report.finding
    if judged.mode is not Mode.ENFORCE:
        return judged
    is_alone = _is_just_evicted(record, rule, now)  # its sighting was recorded, and no outbreak spares it
    if not is_alone and outbreaks.belongs_to_outbreak(state, rule, node, finding, now):
        return _postpone(judged, UndecidedReason.OUTBREAK, now + rule.correlated_s)
    return _respond(judged, Response.ADD_CAUSE)


def _judge_restart(state: FleetState, record: NodeRecord, judged: Judgement, now: float) -> Judgement:
    """Restart ranks within the caps. A node that has used up its own restarts is due for the next step."""
    report, rule, restart = judged.report, judged.rule, Action.RESTART_RANK
    repeated = _is_step_repeated(record, rule, restart, now)
    if state.database.outage:
        return _postpone(judged, UndecidedReason.DATABASE_OUTAGE, now + eviction.DEFERRAL_RECHECK_S)
    may_evict = not repeated and rule.ladder[-1] is not restart
    if may_evict and (why := rank_restarts.node_restart_cap(state, report.node, now)):
        report = msgspec.structs.replace(report, proof=f"{report.finding.message}; {why}")
        before = record.history.ladder_steps.get(rule.id, [])
        steps = policy.append_ladder_step(before, rule, restart, now - rule.coalesce_s)
        action = rule.ladder[policy.next_ladder_step(rule, report.finding, steps, now)]
        return judge_eviction(state, report, now, action=action, restarts_used_up=True)
    why, due = ("", 0.0) if repeated else rank_restarts.fleet_restart_cap(state, now)
    if why:
        sentence = f"{report.finding.message}; the restart of ranks on {report.node} is postponed: {why}"
        return _postpone(judged, UndecidedReason.RESTART_CAP, due, sentence if report.is_logged else "")
    return _respond(judged, Response.RESTART_RANKS, action=restart, is_repeated=repeated)


def _apply(transition: Transition, judged: Judgement) -> None:
    report = judged.report
    match judged.response:
        case Response.ADVISE:
            _advise(transition, judged)
        case Response.WAIT:
            _put_off(transition, judged)
        case Response.SPARE if report.is_logged:
            _add_spared_verdict(transition, report, judged.spared_by)
        case Response.ADD_CAUSE:
            add_cause(transition, report.node, report.finding)
        case Response.RECOMMEND:
            _recommend(transition, judged)
        case Response.RECOMMEND_TO_HOLDER:
            _recommend_to_holder(transition, judged)
        case Response.RESTART_RANKS:
            _restart_ranks(transition, judged)
        case Response.TRY_PAIR:
            _open_pair_case(transition, report)
        case Response.EVICT:
            _evict(transition, judged)


def _advise(transition: Transition, judged: Judgement) -> None:
    report, finding = judged.report, judged.report.finding
    if judged.rule.already_handled:
        _add_verdict(transition, report, Decision.NO_ACTION, f"{finding.message}: {judged.rule.already_handled}")
    elif finding.severity is Severity.CRITICAL and finding.mode is not Mode.OBSERVE:
        what = "inspect it" if finding.action is Action.NONE else finding.action.replace("_", " ")
        words = f"{finding.message}; recommended for {report.node}: {what}"
        _add_verdict(transition, report, Decision.RECOMMEND, words, finding.action)


def _put_off(transition: Transition, judged: Judgement) -> None:
    report, wait = judged.report, judged.deferred_by
    assert isinstance(wait, Postponement)
    if wait.reason is UndecidedReason.OUTBREAK:
        outbreaks.wait_for_outbreak_end(transition.state, report.node, report.finding)
    defer_judgement(transition, report.node, report.finding.key, wait.reason, wait.due)
    if wait.sentence:
        _add_verdict(transition, report, Decision.RECOMMEND, wait.sentence)


def _recommend(transition: Transition, judged: Judgement) -> None:
    """Recommend a ladder step that a person carries out."""
    report, record = judged.report, transition.state.nodes[judged.report.node]
    outbreaks.record_ladder_step(record, judged.rule, judged.action, transition.now)
    transition.mark_node_changed(report.node)
    if report.is_logged and not judged.is_repeated:
        why = outbreaks.describe_rule(judged.rule, record, report.finding, judged.action)
        action = policy.describe_action(judged.action)
        words = f"{report.finding.message}; recommended for {report.node}: {action} ({why})"
        _add_verdict(transition, report, Decision.RECOMMEND, words, judged.action)


def _recommend_to_holder(transition: Transition, judged: Judgement) -> None:
    """Recommend to the holder of the node what would evict a serving node, since a job may still compute on it."""
    report = judged.report
    holder = out_of_service_reason(transition.state.nodes[report.node], transition.now)
    action = policy.describe_action(judged.action)
    words = f"{report.finding.message}; recommended for {report.node}: {action}; no automatic action, because {holder}"
    _add_verdict(transition, report, Decision.RECOMMEND, words, judged.action)


def _restart_ranks(transition: Transition, judged: Judgement) -> None:
    """Restart the ranks that the finding concerns. A repeated step concerns further ranks of the same crash."""
    report, rule, again = judged.report, judged.rule, judged.is_repeated
    node, finding, record = report.node, report.finding, transition.state.nodes[report.node]
    target = rank_restarts.find_restart_target(transition, node, finding, rule)
    words = f"{node}: {finding.message} ({outbreaks.describe_rule(rule, record, finding, judged.action)})"
    outbreaks.record_ladder_step(record, rule, judged.action, transition.now)
    transition.mark_node_changed(node)
    if target is not None and target.members:
        words = f"{words}; {target.describe()} is restarted"
        if not again:
            _add_verdict(transition, report, Decision.RESTART, words, judged.action)
        trace = finding.trace or transition.trace
        rank_restarts.restart_ranks(transition, node, target, words, trace, counted=not again)
    elif not again:
        why = "no rank runs there" if target is None else "its rank was replaced just before"
        _add_verdict(transition, report, Decision.NO_ACTION, f"{words}; {why}")


def _open_pair_case(transition: Transition, report: FindingReport) -> None:
    """Try the node and the peer that its finding names with partners known to be good."""
    node, finding = report.node, report.finding
    peer = finding.evidence.get("peer", finding.subject)
    found = {node: finding}
    if peer != node and peer in transition.state.nodes and is_serving(transition.state, peer):
        found[peer] = finding
    if diagnostics.open_blame_case(transition, BlameIsolationMethod.PAIR, found, f"{finding.message} ({node})") is None:
        due = transition.now + transition.policy.probes.timeout_s
        defer_judgement(transition, node, finding.key, UndecidedReason.BLAME_ISOLATION, due)
    else:
        transition.state.nodes[node].health.undecided_findings[finding.key] = UndecidedReason.BLAME_ISOLATION


def _evict(transition: Transition, judged: Judgement) -> None:
    """Evict the node unless that is deferred. Its jobs leave it at the next boundary, except after wrong results."""
    report, rule, record = judged.report, judged.rule, transition.state.nodes[judged.report.node]
    node, finding, why = report.node, report.finding, report.proof or report.finding.message
    if judged.restarts_used_up:
        outbreaks.record_ladder_step(record, rule, Action.RESTART_RANK, transition.now - rule.coalesce_s)
    sentence = f"{node}: {why} ({outbreaks.describe_rule(rule, record, finding, judged.action)})"
    if isinstance(judged.deferred_by, eviction.Deferral):
        eviction.defer(transition, node, finding, sentence, judged.deferred_by)
        return
    eviction.evict(transition, node, finding, sentence)
    cause = RegroupCause(
        reason=GenerationReason.NODE_EVICTED,
        sentence=f"{node} is evicted ({why})",
        trace=finding.trace or transition.trace,
        at_boundary=finding.kind not in WRONG_RESULTS,
    )
    losses.regroup_jobs_without(transition, node, cause)


def _add_spared_verdict(transition: Transition, report: FindingReport, spared_by: str) -> None:
    words = f"{report.node}: {report.finding.message}; not evicted: {spared_by} (a cause outside the nodes)"
    _add_verdict(transition, report, Decision.CORRELATED, words)


def _add_verdict(
    transition: Transition, report: FindingReport, decision: Decision, sentence: str, action: Action = Action.NONE
) -> None:
    finding: Finding = report.finding
    trace = finding.trace or transition.trace
    transition.add_verdict(report.node, decision, sentence, action=action, evidence=(finding,), trace=trace)
