"""The database is away: what must survive this controller cannot be decided, and is refused with the reason.

Nodes are suspected and lost, and running jobs regroup, as ever: that is learned anew by whoever follows. Evictions are
held, and judged again by what stands when the database is back.
"""

from __future__ import annotations

from everstep.errors import Unavailable
from everstep.vocabulary import GenerationReason, JobState
from everstep_controller.core.events import StoreChanged
from everstep_controller.core.jobs.generations import Cause, regroup
from everstep_controller.core.jobs.lifecycle import look_again
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn

STORE = "store"
"""What holds an eviction while the database is away."""


def refuse_while_away(state: FleetState) -> None:
    """Raises Unavailable for what only the database could promise."""
    if state.store_away:
        raise Unavailable(
            f"the database is away ({state.store_away}), so an order could be forgotten: give it again when it is back"
        )


def store_changed(turn: Turn, event: StoreChanged) -> None:
    """The database went away, or is back."""
    state = turn.state
    if event.away:
        begins, state.store_away = not state.store_away, event.reason or "it does not answer"
        if begins:
            state.store_away_at = turn.now
            turn.audit(
                "store.away",
                f"the database is away ({state.store_away}): running jobs go on and regroup; nobody is evicted, no "
                "version is committed, no job begins and no order is taken until it is back",
            )
        for job in event.unsent:
            _decide_again(turn, job)
    elif state.store_away:
        turn.audit("store.back", f"the database is back (it was away: {state.store_away})")
        state.store_away = ""
        for live in state.live_jobs.values():
            live.untold = 0
        look_again(turn)
        turn.freed[STORE] = None


def _decide_again(turn: Turn, name: str) -> None:
    """A running job's newest generation was never told, and its number may be given by another controller: the same
    seats get one that is this controller's alone. A job that was only to begin, and one that may run on until its
    boundary, can wait until the database is back."""
    job = turn.state.jobs.get(name)
    spec = job.generation if job is not None else None
    if job is None or spec is None or job.state is not JobState.RUNNING:
        return
    if spec.reason is GenerationReason.FORMED or job.leaving is not None:
        turn.state.live_jobs[name].untold = spec.number
        return
    sentence = f"generation {spec.number} was decided as the database went away, and nobody was told"
    others = frozenset(turn.state.nodes) - spec.seated
    regroup(turn, job, Cause(reason=spec.reason, sentence=sentence, trace=spec.trace, without=others))
