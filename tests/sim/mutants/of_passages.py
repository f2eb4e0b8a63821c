"""Mistakes about what is over, what is not yet, and who is only silent."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec
from everstep_controller.core import startup
from everstep_controller.core.checkpoints import commits
from everstep_controller.core.jobs import generations, hangs, losses
from everstep_controller.core.liveness import correlation, node_liveness

from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.surgery import mistaken, swapped


def _silences_of_before() -> AbstractContextManager[None]:
    """A controller that begins takes for silence what was before it began."""
    real = startup.started

    def started(turn: Any, event: Any) -> None:
        real(turn, event)
        turn.state.hearing.since = turn.state.hearing.last_at = 0.0

    return swapped(real, started)


def _without_a_vote() -> AbstractContextManager[None]:
    """What digests say is not looked at."""
    real = commits.count_votes

    def count_votes(digests: Any) -> Any:
        return msgspec.structs.replace(real(digests), liars=frozenset(), tied=frozenset())

    return swapped(real, count_votes)


OF_PASSAGES: tuple[Mutant, ...] = (
    Mutant(
        "a collective that failed in a generation before counts",
        lambda: mistaken(losses.collective_failed, "spoken_of(job, report.generation)", "running_spec(job)"),
        seeds=(6,),
    ),
    Mutant(
        "a rank that stood still in a generation before counts",
        lambda: mistaken(hangs.rank_stalled, "or report.generation != spec.number", ""),
        seeds=(192,),
    ),
    Mutant(
        "a boundary counts as crossed a step too soon",
        lambda: mistaken(
            generations.check_boundary,
            "step >= (spec.after_step or 0)):\n        if entered or turn.now >= live.fallback_at:",
            "step >= (spec.after_step or 0) - 1):\n        if True:",
        ),
        seeds=(13,),
    ),
    Mutant("digests that differ are committed", _without_a_vote, seeds=(15,)),
    Mutant(
        "what nobody was compared with counts as verified",
        lambda: swapped(commits.corroborated, lambda digests, ranks: True),
    ),
    Mutant(
        "who takes over compares nobody's pace",
        lambda: mistaken(startup.started, "state.jobs[name].resumed_at is not None", "False"),
        seeds=(50108,),
    ),
    Mutant("a silence of before the start counts", _silences_of_before),
    Mutant(
        "a silent fleet is lost node by node",
        lambda: swapped(correlation.is_doubted, lambda turn, node, since: False),
        seeds=(2,),
    ),
    Mutant(
        "whoever is suspected is lost",
        lambda: mistaken(node_liveness.judge, "Answer.SUSPECT if silent_s < loss_s(policy, longest_s) else ", ""),
    ),
)
