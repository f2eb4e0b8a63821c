"""Mutants of jobs: generations, membership, and the samples of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from everstep_controller.core import startup
from everstep_controller.core.jobs import generations, losses
from everstep_controller.core.liveness import node_liveness
from everstep_controller.core.seats import membership
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.runtime.directives import ReceivedDirectives
from tests.sim.cluster import training_state
from tests.sim.mutants.mutant import Mutant, do_nothing, return_false
from tests.sim.mutants.patching import edited_function, edited_method, replaced_function, replaced_method


def _reuse_generation_numbers() -> AbstractContextManager[None]:
    """Load the number of a job's newest generation one too low after every restart."""
    real = startup.restore_state

    def restore(*arguments: Any, **options: Any) -> Any:
        state = real(*arguments, **options)
        for job in state.jobs.values():
            job.progress.last_number = max(0, job.progress.last_number - 1)
        return state

    return replaced_function(real, restore)


def _forget_holds() -> AbstractContextManager[None]:
    """Forget on a takeover the holds and cordons that keep nodes out of service."""
    real = startup.restore_state

    def restore(*arguments: Any, **options: Any) -> Any:
        state = real(*arguments, **options)
        for node in state.nodes.values():
            node.scheduling.hold_reason = node.scheduling.external_cordon_by = ""
        return state

    return replaced_function(real, restore)


@contextmanager
def _overlap_samples() -> Iterator[None]:
    """Let neighbouring ranks share samples. The caches of the real sampler are cleared before and after."""
    patch = edited_method(
        ElasticSampler, "batch_range", "(self._rank + 1) * batch // world", "(self._rank + 1) * batch"
    )
    _clear_sample_caches()
    try:
        with patch:
            yield
    finally:
        _clear_sample_caches()


def _clear_sample_caches() -> None:
    training_state.samples_of.cache_clear()
    training_state.samples_of_all.cache_clear()


def _seat_suspects() -> AbstractContextManager[None]:
    """Choose suspected nodes for new rosters."""
    return edited_function(
        membership.unfit_reason,
        "(running and record.state is NodeState.SUSPECT)",
        "record.state is NodeState.SUSPECT",
    )


MEMBERSHIP_MUTANTS: tuple[Mutant, ...] = (
    Mutant("a new controller forgets holds and cordons", _forget_holds, seeds=(57, 4)),
    Mutant("generation numbers are used again after a restart", _reuse_generation_numbers, seeds=(50,)),
    Mutant(
        "ranks ignore that their generation is over",
        lambda: replaced_method(ReceivedDirectives, "is_generation_over", return_false),
        seeds=(4,),
    ),
    Mutant("rosters take suspected nodes in", _seat_suspects, seeds=(2,)),
    Mutant(
        "a witness is ignored",
        lambda: replaced_function(losses.regroup_without_missing, return_false),
        seeds=(23, 112),
    ),
    Mutant("jobs never grow back", lambda: replaced_function(generations.consider_growth, do_nothing)),
    Mutant(
        "the return of a node is ignored",
        lambda: edited_function(node_liveness.mark_seen, "handle_return(transition, node)", "pass"),
        seeds=(3,),
    ),
)

SAMPLE_MUTANTS: tuple[Mutant, ...] = (Mutant("ranks share samples", _overlap_samples),)
