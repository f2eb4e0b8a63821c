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
    real = startup.handle_controller_started

    def started(transition: Any, event: Any) -> None:
        real(transition, event)
        transition.state.observer.receiving_since = transition.state.observer.last_received_at = 0.0

    return swapped(real, started)


def _without_a_vote() -> AbstractContextManager[None]:
    """What digests say is not looked at."""
    real = commits.compare_digests

    def count_votes(digests: Any) -> Any:
        return msgspec.structs.replace(real(digests), divergent_ranks=frozenset(), tied_ranks=frozenset())

    return swapped(real, count_votes)


OF_PASSAGES: tuple[Mutant, ...] = (
    Mutant(
        "a collective that failed in a generation before counts",
        lambda: mistaken(
            losses.handle_collective_failed,
            "find_generation(job, report.generation)",
            "job.running_generation",
        ),
        seeds=(6,),
    ),
    Mutant(
        "a rank that stood still in a generation before counts",
        lambda: mistaken(hangs.handle_rank_stalled, "or report.generation != spec.number", ""),
        seeds=(192,),
    ),
    Mutant(
        "a boundary counts as crossed a step too soon",
        lambda: mistaken(
            generations.check_boundary,
            "step >= (spec.after_step or 0)):\n"
            "        if entered or transition.now >= live.regroup.boundary_fallback_at:",
            "step >= (spec.after_step or 0) - 1):\n        if True:",
        ),
        seeds=(13,),
    ),
    Mutant("digests that differ are committed", _without_a_vote, seeds=(28,)),
    Mutant(
        "what nobody was compared with counts as verified",
        lambda: swapped(commits.all_ranks_compared, lambda digests, ranks: True),
    ),
    Mutant(
        "who takes over compares nobody's pace",
        lambda: mistaken(startup.handle_controller_started, "if has_resumed:", "if False:"),
        seeds=(50108,),
    ),
    Mutant("a silence of before the start counts", _silences_of_before),
    Mutant(
        "a silent fleet is lost node by node",
        lambda: swapped(correlation.is_silence_excused, lambda transition, node, since: False),
        seeds=(2,),
    ),
    Mutant(
        "whoever is suspected is lost",
        lambda: mistaken(
            node_liveness.classify_silence,
            "Liveness.SUSPECT if silent_s < loss_timeout_s(policy, longest_pause_s) else ",
            "",
        ),
    ),
)
