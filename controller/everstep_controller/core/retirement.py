"""Nodes that are gone for good, and jobs that are over for long: forgotten by an operator's word, or by age. A job that
nobody goes on with is over after a while.

Nobody is forgotten whom a job may still want, and by age nobody against whom something stands that no sensor would see
again. A node that comes back under a forgotten name is a new one. But of one that was not fit to serve so much is kept:
it comes back through the diagnostics, as it would have had to (``agents``).
"""

from __future__ import annotations

from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.effects import NoteCleared
from everstep_controller.core.health import node_state
from everstep_controller.core.health.eviction import release
from everstep_controller.core.jobs import job_index
from everstep_controller.core.jobs.lifecycle import fail
from everstep_controller.core.jobs.membership import ENDED, is_seated
from everstep_controller.core.records import Course, JobRecord, NodeRecord, Unfit
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn

LOOK_S = 600.0
"""Seconds between two looks at what has become old."""
MOST_AT_ONCE = 256
"""Nodes, and jobs, that one look forgets: the rest follows a second later, so that one transaction stays short."""
AGAIN_S = 1.0
MOST_UNFIT = 1000
"""Names of forgotten nodes that were not fit to serve; beyond them those go that were forgotten first."""
UNFIT = (NodeState.QUARANTINED, NodeState.REPAIR)
"""States from which only a probe leads back to service. Who was lost, or is held, on that way has a course."""
FLEET = "fleet"


def look_later(turn: Turn, wait_s: float = LOOK_S) -> None:
    """Asks for the next look, where policy wants any."""
    policy = turn.policy
    if policy.forget_nodes_after_s or policy.forget_jobs_after_s or policy.desert_jobs_after_s:
        turn.wake(turn.now + wait_s, "retention", FLEET)


def look(turn: Turn) -> None:
    """Forgets what is older than policy keeps. Not while the database is away: it would have to be done again."""
    jobs = nodes = 0
    if not turn.state.store_away:
        _end_deserted(turn)
        jobs, nodes = _old_jobs(turn), _old_nodes(turn)
    look_later(turn, AGAIN_S if MOST_AT_ONCE in (jobs, nodes) else LOOK_S)


# --- nodes -------------------------------------------------------------------------------------------------------


def why_kept(state: FleetState, node: str) -> str:
    """What speaks against forgetting the node, in words and with the mend; empty where nothing does."""
    if node in state.reachable:
        return f"{node} is heard: end its agent first, else it would be back at once"
    for job in state.jobs.values():
        if job.state in ENDED:
            continue
        if is_seated(job, node):
            return f"{node} is in the roster of {job.job}, which is {job.state}: stop the job, or let it go on without"
        if job.homes is not None and node in job.homes.shares:
            return f"{node} may hold a share of what {job.job} has committed: wait for its next commit, or stop the job"
    busy = (*(probe.nodes for probe in state.probes.values()), *(case.suspects for case in state.cases.values()))
    if any(node in those for those in busy):
        return f"a probe of {node} is under way: wait until it has ended"
    return ""


def _old_nodes(turn: Turn) -> int:
    """How many were forgotten."""
    state, after_s = turn.state, turn.policy.forget_nodes_after_s
    if not after_s:
        return 0
    old = [n for n, one in state.nodes.items() if _lapses(one) and turn.now - _gone_since(one) >= after_s]
    found = [node for node in old if not why_kept(state, node)][:MOST_AT_ONCE]
    for node in found:
        days = (turn.now - _gone_since(state.nodes[node])) / 86400
        forget_node(turn, node, f"{node} was not heard for {days:.1f} days and is forgotten")
    return len(found)


def _lapses(record: NodeRecord) -> bool:
    """Whether time alone ends it. What a person has said of a node, or must say, stays until a person ends it."""
    if record.reachable or record.hold or record.foreign or record.needs_operator or record.condemned:
        return False
    return record.state in (NodeState.LOST, NodeState.QUARANTINED)


def _gone_since(record: NodeRecord) -> float:
    return max(record.lost_at, record.since)


def forget_node(turn: Turn, node: str, sentence: str) -> None:
    """Drops all that is known of a node that nothing keeps (``why_kept``); its lines in the audit log stay."""
    state, record = turn.state, turn.state.nodes[node]
    release(turn, node)
    node_state.uncordon(turn, node, sentence)
    _remember(turn, record)
    turn.audit("node.forgotten", sentence, node=node)
    for key in (*record.findings, *record.own):
        turn.emit(NoteCleared(node, key, turn.now))
    for job in state.jobs.values():
        _strike(turn, job, node)
    if any(window.node == node for window in state.fleet.maintenance):
        state.fleet.maintenance = [window for window in state.fleet.maintenance if window.node != node]
        turn.fleet_changed()
    for seen in state.sightings.values():
        seen.pop(node, None)
    for waiting in state.outbreaks.values():
        waiting.pop(node, None)
    job_index.node_forgotten(state, node)
    del state.nodes[node], state.live_nodes[node]
    turn.node_forgotten(node)


def _remember(turn: Turn, record: NodeRecord) -> None:
    """Keeps that the node was not fit to serve, should anything register under its name."""
    if record.state not in UNFIT and record.course is None and not record.condemned:
        return
    unfit, course = turn.state.fleet.unfit, record.course or Course()
    unfit.pop(record.node, None)
    unfit[record.node] = Unfit(
        sentence=f"{record.node} was forgotten while it was out of service ({record.sentence})",
        checks=course.checks,
        passes=course.passes,
        condemned=tuple(record.condemned),
    )
    while len(unfit) > MOST_UNFIT:
        del unfit[next(iter(unfit))]
    turn.fleet_changed()


def _strike(turn: Turn, job: JobRecord, node: str) -> None:
    """The job knows the node no more. One that counts it among the homes of a version is over, and keeps none."""
    shares = job.homes.shares if job.homes is not None else {}
    if not any(node in place for place in (job.launchers, job.excluded, job.losses, job.slow, job.former, shares)):
        return
    job.launchers.pop(node, None)
    for place in (job.excluded, job.losses, job.slow):
        place.pop(node, None)
    job.former = [other for other in job.former if other != node]
    if job.homes is not None and node in job.homes.shares:
        job.homes = None
    turn.job_changed(job.job)


# --- jobs --------------------------------------------------------------------------------------------------------


def _end_deserted(turn: Turn) -> None:
    """Ends jobs that do not run, whose launchers have all left, and that nobody went on with in time: they keep memory
    of their nodes taken. One whose launchers are only out of reach may be running there."""
    after_s = turn.policy.desert_jobs_after_s
    for job in turn.state.jobs.values() if after_s else ():
        deserted = job.state in (JobState.FORMING, JobState.PAUSED) and not job.launchers
        if deserted and turn.now - max(job.since, job.deserted_at) >= after_s:
            sentence = f"all its launchers have left, and none came for {after_s / 3600:g} h: its memory is given back"
            fail(turn, job, sentence)


def _old_jobs(turn: Turn) -> int:
    """How many were forgotten."""
    state, after_s = turn.state, turn.policy.forget_jobs_after_s
    if not after_s:
        return 0
    old = [j for j, one in state.jobs.items() if one.state in ENDED and turn.now - one.since >= after_s]
    for name in old[:MOST_AT_ONCE]:
        _forget_job(turn, name)
    return len(old[:MOST_AT_ONCE])


def _forget_job(turn: Turn, name: str) -> None:
    job = turn.state.jobs[name]
    days = (turn.now - job.since) / 86400
    job_index.drop_job(turn, name, f"job {name} {job.state} {days:.1f} days ago and is forgotten")
