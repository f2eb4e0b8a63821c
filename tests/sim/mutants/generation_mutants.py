"""Mutants of generation changes and of the loss of silent nodes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from everstep_controller.core import startup
from everstep_controller.core.checkpoints import commits
from everstep_controller.core.jobs import generations, hangs, losses
from everstep_controller.core.liveness import correlation, suspicion
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.patching import edited_function, replaced_function


def _count_earlier_silence() -> AbstractContextManager[None]:
    """Count the time before a controller began as silence."""
    real = startup.handle_controller_started

    def started(transition: Any, event: Any) -> None:
        real(transition, event)
        transition.state.observer.receiving_since = transition.state.observer.last_received_at = 0.0

    return replaced_function(real, started)


def _ignore_digest_differences() -> AbstractContextManager[None]:
    """Ignore differences between digests."""
    real = commits.compare_digests

    def count_votes(digests: Any) -> Any:
        return msgspec.structs.replace(real(digests), divergent_ranks=frozenset(), tied_ranks=frozenset())

    return replaced_function(real, count_votes)


GENERATION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a failed collective of an earlier generation counts",
        lambda: edited_function(
            losses.handle_collective_failed,
            "find_generation(job, report.generation)",
            "job.running_generation",
        ),
        seeds=(6,),
    ),
    Mutant(
        "a stalled rank of an earlier generation counts",
        lambda: edited_function(hangs.handle_rank_stalled, "or report.generation != spec.number", ""),
        seeds=(192,),
    ),
    Mutant(
        "a boundary counts as crossed a step too soon",
        lambda: edited_function(
            generations.settle_boundary,
            "step >= (spec.after_step or 0)):\n"
            "        if entered or transition.now >= live.regroup.boundary_fallback_at:",
            "step >= (spec.after_step or 0) - 1):\n        if True:",
        ),
        seeds=(13,),
    ),
    Mutant("digests that differ are committed", _ignore_digest_differences, seeds=(28,)),
    Mutant(
        "a version whose ranks were not all compared counts as verified",
        lambda: replaced_function(commits.all_ranks_compared, lambda digests, ranks: True),
    ),
    Mutant(
        "a new leader compares no step times",
        lambda: edited_function(startup.handle_controller_started, "if has_resumed:", "if False:"),
        seeds=(50108,),
    ),
    Mutant("silence before the controller began counts", _count_earlier_silence),
    Mutant(
        "a silent fleet is lost node by node",
        lambda: replaced_function(correlation.is_silence_excused, lambda transition, node, since: False),
        seeds=(2,),
    ),
    Mutant(
        "a suspected node is lost at once",
        lambda: edited_function(
            suspicion.classify_silence,
            "Liveness.SUSPECT if silent_s < loss_timeout_s(policy, longest_pause_s) else ",
            "",
        ),
    ),
)
