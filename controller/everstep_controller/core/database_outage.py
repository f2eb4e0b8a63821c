"""Refuse decisions that must survive this controller while the database is unavailable.

Nodes are still suspected and lost, and running jobs regroup, because a successor learns these facts again. Evictions
are deferred and judged again when the database is back.
"""

from __future__ import annotations

from everstep.errors import Unavailable
from everstep.vocabulary import GenerationReason, JobState
from everstep_controller.core.events import DatabaseAvailabilityChanged
from everstep_controller.core.jobs.generations import RegroupCause, regroup
from everstep_controller.core.jobs.lifecycle import wake_jobs
from everstep_controller.core.state import FleetState, ScopeKind
from everstep_controller.core.transition import Transition


def refuse_during_outage(state: FleetState) -> None:
    """Raise Unavailable for orders that only the database could keep."""
    if state.database_outage:
        raise Unavailable(
            f"the database is unavailable ({state.database_outage}), so the order could not be recorded: repeat it "
            "once the database is back"
        )


def handle_database_change(transition: Transition, event: DatabaseAvailabilityChanged) -> None:
    """Handle the start or the end of an outage."""
    state = transition.state
    if event.is_unavailable:
        begins, state.database_outage = not state.database_outage, event.reason or "it does not answer"
        if begins:
            state.database_outage_since = transition.now
            transition.audit(
                "database.unavailable",
                f"the database is unavailable ({state.database_outage}): running jobs continue and regroup; until it "
                "is back, no node is evicted, no version is committed, no job starts and no order is accepted",
            )
        for job in event.unsent_jobs:
            _reissue_generation(transition, job)
    elif state.database_outage:
        transition.audit(
            "database.available", f"the database is available again (it was unavailable: {state.database_outage})"
        )
        state.database_outage = ""
        for live in state.job_runtime.values():
            live.regroup.unannounced_generation = 0
        wake_jobs(transition)
        transition.freed_scopes[ScopeKind.DATABASE.scope()] = None


def _reissue_generation(transition: Transition, name: str) -> None:
    """Give a running job's unsent generation a number that no other controller can give.

    A job that was only about to begin, or that may run on until its boundary, waits for the database instead.
    """
    job = transition.state.jobs.get(name)
    spec = job.generation if job is not None else None
    if job is None or spec is None or job.status.state is not JobState.RUNNING:
        return
    if spec.reason is GenerationReason.FORMED or job.outgoing_generation is not None:
        transition.state.job_runtime[name].regroup.unannounced_generation = spec.number
        return
    sentence = f"generation {spec.number} was decided but never announced, because the database became unavailable"
    others = frozenset(transition.state.nodes) - spec.seated_nodes
    regroup(
        transition, job, RegroupCause(reason=spec.reason, sentence=sentence, trace=spec.trace, nodes_to_exclude=others)
    )
