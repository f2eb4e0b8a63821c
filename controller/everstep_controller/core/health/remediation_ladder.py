"""The cures of a node that is out: one after the other, each under caps, each confirmed before the way back opens."""

from __future__ import annotations

import math

import msgspec

from everstep.vocabulary import (
    Action,
    Decision,
    Finding,
    FindingKind,
    GenerationReason,
    JobState,
    Mode,
    NodeState,
    Severity,
)
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_controller.core import records
from everstep_controller.core.events import ActionReported
from everstep_controller.core.health import evidence as offenders
from everstep_controller.core.health import node_state
from everstep_controller.core.health.evidence import clear_own, suspect_gpus
from everstep_controller.core.health.node_state import kept_out, set_state
from everstep_controller.core.health.outbreaks import GATHER_S, under_reserve_until
from everstep_controller.core.jobs.generations import Cause
from everstep_controller.core.jobs.losses import replace_rank, running_spec
from everstep_controller.core.jobs.membership import jobs_seated_on
from everstep_controller.core.jobs.notifications import note_replaced, send_kill
from everstep_controller.core.policy import Rule, in_words, remember_step
from everstep_controller.core.records import Course, JobRecord, NodeRecord
from everstep_controller.core.transition import Turn

SEAT_RETRY_S = 1.0
"""How soon a node that its jobs have not left yet is looked at again."""


def go_on(turn: Turn, node: str) -> None:
    """The causes of a quarantine stand: asks for the cure that is due, where the policy lets it."""
    record, course = turn.state.nodes[node], turn.state.nodes[node].course
    if course is None or not course.ladder or turn.policy.remediate is not Mode.ENFORCE or turn.state.store_away:
        return
    if record.needs_operator and not record.condemned:
        _hinder(turn, record, course, f"an operator took {node} out: nothing is done to it by itself")
    elif why := kept_out(record, turn.now):
        _hinder(turn, record, course, f"{why}: nothing is done to it by itself")
    elif course.remedy:
        _check_reported(turn, node, course)
    elif course.settles_at and turn.now < course.settles_at:
        turn.wake(course.settles_at, "care", node)
    elif course.settles_at:
        how = "was only a dry run" if node_state.was_dry_run(record) else "was confirmed"
        _next_rung(turn, node, course, f"{how}, and what it should have cured stands")
    else:
        _carry_out(turn, node, course)


def _check_reported(turn: Turn, node: str, course: Course) -> None:
    if turn.now < course.remedy_due:
        turn.wake(course.remedy_due, "care", node)
        return
    course.remedy = ""
    _next_rung(turn, node, course, f"was not reported within {turn.policy.remedy_timeout_s:g} s")


def _carry_out(turn: Turn, node: str, course: Course) -> None:
    record, cure = turn.state.nodes[node], course.ladder[course.rung]
    place = f"step {course.rung + 1} of {len(course.ladder)} under {course.rule}"
    if _waits(turn, node, hands_over=cure is Action.REPAIR):
        return
    if cure is Action.REPAIR:
        to_repair(turn, node, f"{node} needs a person: {', '.join(record.causes)} stands, and repair is {place}")
    elif cure not in node_state.KINDS:
        return
    elif jobs_seated_on(turn.state, node):
        turn.wake(math.floor(turn.now) + SEAT_RETRY_S, "care", node)  # whole seconds: one look, however often asked for
    elif why := node_state.remediation_cap(turn, node):
        if _waits(turn, node, hands_over=True):
            return
        to_repair(turn, node, f"{node} needs a person: {', '.join(record.causes)} stands, and {why}")
    elif (fleet := node_state.fleet_cap(turn))[0]:
        _hinder(turn, record, course, f"{in_words(cure)} of {node} waits: {fleet[0]}")
        turn.wake(fleet[1], "care", node)
    else:
        sentence = f"{in_words(cure)} of {node} against {', '.join(record.causes)}, {place}"
        course.remedy = node_state.treat(turn, node, cure, sentence)
        course.remedy_due = turn.now + turn.policy.remedy_timeout_s
        course.hindered, record.action = "", cure
        if (rule := turn.policy.rules.called(course.rule)) is not None:  # a repeat takes the step after this one
            record.steps[rule.id] = remember_step(record.steps.get(rule.id, []), rule, cure, turn.now)
        turn.audit("remedy.asked", sentence, node=node, data={"remedy": course.remedy})
        turn.wake(course.remedy_due, "care", node)


def _waits(turn: Turn, node: str, *, hands_over: bool) -> bool:
    """An eviction that may be taken back is not acted upon: a machine is left alone for a moment, and not given to
    people (``hands_over``), who would go on with it, before it is certain."""
    record = turn.state.nodes[node]
    reserve = under_reserve_until(record)
    due = reserve if hands_over else min(reserve, record.since + GATHER_S)
    if turn.now < due:
        turn.wake(math.ceil(due), "care", node)
    return turn.now < due


def _next_rung(turn: Turn, node: str, course: Course, why: str) -> None:
    record, cure = turn.state.nodes[node], course.ladder[course.rung]
    course.settles_at = 0.0
    turn.node_changed(node)
    sentence = f"{in_words(cure)} of {node} {why}"
    turn.audit("remedy.failed", sentence, node=node)
    records.enter(record, turn.now, "action", sentence)
    if course.rung + 1 < len(course.ladder):
        course.rung += 1
    elif not kept_out(record, turn.now):  # whoever keeps it out may change it: the last step is taken again after that
        to_repair(turn, node, f"{node} needs a person: {sentence}, and nothing is left to try")
        return
    go_on(turn, node)


def reported(turn: Turn, event: ActionReported) -> None:
    """How an action ended. A confirmed cure opens the way to the diagnostics, a failed one leads to the next; a node
    that got well meanwhile need not wait for it any more."""
    record = turn.state.nodes.get(event.node)
    if record is None:
        turn.ignore("action_reported.unknown")
        return
    how = _outcome(event) if event.ok else f"failed: {event.detail}"
    records.enter(record, turn.now, "action", f"{event.id} {how}", {"remedy": event.id})
    turn.node_changed(event.node)
    course = record.course
    if course is not None and course.remedy == event.id:
        course.remedy = ""
        if event.dry_run:
            node_state.note_dry_run(record)
        if record.state is not NodeState.QUARANTINED:
            turn.wake(turn.now, "care", event.node)
        elif event.ok:
            _confirmed(turn, event.node, course, event)
        else:
            _next_rung(turn, event.node, course, f"failed ({event.detail})")
        return
    if not event.ok:
        turn.audit("remedy.failed", f"{event.id} of {event.node} failed: {event.detail}", node=event.node)
        if record.cordoned == event.id:
            record.cordoned = node_state.PERHAPS


def _outcome(event: ActionReported) -> str:
    return "would have been carried out (dry run: nothing was done)" if event.dry_run else "was carried out"


def _confirmed(turn: Turn, node: str, course: Course, event: ActionReported) -> None:
    """What sensors see clears by their word; whether memory holds its patterns again, the diagnostics tell. No reset
    cures who computed wrongly: that node stays out until somebody vouches for it."""
    record, cure = turn.state.nodes[node], course.ladder[course.rung]
    course.settles_at = turn.now + turn.policy.remedy_settle_s
    cured = [key for key, finding in record.own.items() if finding.kind is FindingKind.MEMORY_WRONG]
    clear_own(turn, node, cured)
    if cured and not any(finding.severity is Severity.CRITICAL for finding in record.own.values()):
        record.needs_operator, record.condemned = False, []
    turn.audit("remedy.confirmed", f"{in_words(cure)} of {node} {_outcome(event)}", node=node)
    turn.wake(turn.now, "care", node)


def _hinder(turn: Turn, record: NodeRecord, course: Course, sentence: str) -> None:
    """Says once why nothing is done."""
    if course.hindered == sentence:
        return
    course.hindered = sentence
    turn.node_changed(record.node)
    turn.audit("remedy.hindered", sentence, node=record.node)


def to_repair(turn: Turn, node: str, sentence: str) -> None:
    """Out until somebody readmits it; whoever mends it gets everything known against it."""
    record = turn.state.nodes[node]
    set_state(turn, node, NodeState.REPAIR, sentence)
    record.action, record.probe, record.overruled = Action.REPAIR, "", ""
    evidence = tuple(f for f in record.known() if f.key in record.causes)
    turn.verdict(node, Decision.REPAIR, sentence, action=Action.REPAIR, evidence=evidence)
    node_state.repair(turn, node, sentence)


def check_offences(turn: Turn, node: str) -> bool:
    """Sends a lemon to repair instead of back; False where the node is none, or somebody's word keeps it as it is."""
    if not offenders.is_lemon(turn, node) or kept_out(turn.state.nodes[node], turn.now):
        return False
    if _waits(turn, node, hands_over=True):
        return True
    to_repair(turn, node, f"{node} offends again and again: {offenders.in_words(turn, node)}")
    return True


# ---- rank restarts
# The mildest cure of a ladder: the processes of a node's ranks are ended, and their job regroups with others in place.
#
# It costs the job one regrouping and nobody an eviction. Like a hung rank's, the end is ordered with the generation's
# number and sent before the next generation, so that it never meets the process that took the place.


class Target(msgspec.Struct, frozen=True):
    """Ranks of a job that are to be restarted, all on one node. ``members`` may be empty: they have been, just now."""

    job: JobRecord
    spec: GenerationSpec
    members: tuple[Member, ...]

    def in_words(self) -> str:
        ranks = ", ".join(str(member.rank) for member in self.members)
        return f"rank {ranks} of {self.job.job}"


def target_of(turn: Turn, node: str, finding: Finding, rule: Rule) -> Target | None:
    """Which ranks the finding is about: those of its GPU where one can be told, else all on the node. None where none
    computes there.

    Who was replaced within the rule's ``same_s`` is left alone: what the finding tells of ended the process before.
    """
    record = turn.state.nodes[node]
    job = next((job for job in jobs_seated_on(turn.state, node) if job.state is JobState.RUNNING), None)
    spec = running_spec(job) if job is not None else None
    members = tuple(spec.on(node)) if spec is not None else ()
    if job is None or spec is None or not members:
        return None
    gpus = {gpu.index for gpu in suspect_gpus(record, (finding,))}
    if gpus and spec.spec.nproc_per_node == len(record.gpus):  # then a local rank computes on the GPU of its number
        members = tuple(member for member in members if member.local_rank in gpus)
    replaced = turn.state.live_jobs[job.job].replaced.get(node, {})
    due = (member for member in members if replaced.get(member.local_rank, 0.0) <= turn.now - rule.same_s)
    return Target(job, spec, tuple(due))


def restart(turn: Turn, node: str, target: Target, sentence: str, trace: str, *, counted: bool) -> None:
    """Ends the processes, and regroups. ``counted``: under both caps; one crash of several GPUs counts once."""
    if counted:
        record, fleet, policy = turn.state.nodes[node], turn.state.fleet, turn.policy
        record.restarted = node_state.noted(record.restarted, turn.now, policy.remedy_node_window_s)
        fleet.restarted = node_state.noted(fleet.restarted, turn.now, policy.remedy_fleet_window_s)
        turn.node_changed(node)
        turn.fleet_changed()
    for member in target.members:
        send_kill(turn, target.job, member, target.spec.number, sentence, trace)
        note_replaced(turn, target.job, node, member.local_rank)
    replace_rank(turn, target.job, node, Cause(reason=GenerationReason.RANK_LOST, sentence=sentence, trace=trace))


def restart_cap(turn: Turn, node: str) -> str:
    """Why the node's ranks are not restarted once more, in words; empty while they may be."""
    times, policy = turn.state.nodes[node].restarted, turn.policy
    what = "its ranks were restarted"
    return node_state.times_cap(times, turn.now, policy.remedy_node_window_s, policy.restarts_per_node, what)


def fleet_cap(turn: Turn) -> tuple[str, float]:
    """Why no rank is restarted now, and when the next one may be; ("", 0.0) below the fleet's cap."""
    times, window_s = turn.state.fleet.restarted, turn.policy.remedy_fleet_window_s
    count, at = node_state.next_at(times, turn.now, window_s, turn.policy.restarts_per_fleet)
    return (f"ranks were restarted {count} times within {window_s:g} s" if count else ""), at
