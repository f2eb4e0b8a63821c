"""Mutants of checkpoints: commits, restores, parity, and checkpoints on storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from everstep_controller.core.checkpoints import commits, parity, storage
from everstep_controller.core.judgement import case_outcomes
from everstep_controller.core.records import JobRecord
from everstep_trainer.slots import version_choice
from tests.sim.mutants.mutant import Mutant, do_nothing
from tests.sim.mutants.patching import edited_function, replaced_function, replaced_method


def _count_stale_seals() -> AbstractContextManager[None]:
    """Count seals of a finished generation for its version."""
    real = case_outcomes.handle_sealed

    def handle_sealed(transition: Any, job: Any, node: str, report: Any) -> None:
        spec = job.running_generation
        if spec is not None and report.generation < spec.number and report.rank < spec.world_size:
            commits.record_seal(transition, job, spec, report)
        else:
            real(transition, job, node, report)

    return replaced_function(real, handle_sealed)


def _forget_restore_floor() -> AbstractContextManager[None]:
    """Leave the floor out of every restore rule."""
    real = commits.restore_rule

    def rule(transition: Any, job: Any) -> Any:
        return msgspec.structs.replace(real(transition, job), floor=None)

    return replaced_function(real, rule)


@contextmanager
def _count_failed_parity() -> Iterator[None]:
    """Accept a refusal to make parity as an answer, and do not compare P with Q."""
    with (
        edited_function(parity.handle_version_protected, "elif report.code:", "elif False:"),
        edited_function(parity._activate_if_equal, "if p is None or p != q:", "if False:"),
    ):
        yield


@contextmanager
def _never_repeat_orders() -> Iterator[None]:
    """Never repeat an unanswered order to spill or to make parity."""
    with replaced_function(storage.advance_spill, do_nothing), replaced_function(parity.advance_protection, do_nothing):
        yield


COMMIT_MUTANTS: tuple[Mutant, ...] = (
    Mutant("seals of an older generation count", _count_stale_seals, seeds=(7,)),
    Mutant(
        "a version is committed before every rank keeps it",
        lambda: edited_function(commits._settle_version, "ballot.safe_ranks == ballot.sealed_ranks and", ""),
        seeds=(3,),
    ),
    Mutant(
        "a seal that is not safe counts",
        lambda: edited_function(
            commits.record_seal, "report.durable and report.commit_candidate", "report.commit_candidate"
        ),
        seeds=(17,),
    ),
    Mutant("the floor of a restore is forgotten", _forget_restore_floor, seeds=(20,)),
    Mutant(
        "after corruption anything may be restored",
        lambda: edited_function(
            commits.roll_back_to_clean, "job.commits.restore_ceiling = clean or NO_VERSION", "pass"
        ),
        seeds=(109,),
    ),
    Mutant(
        "a version above the ceiling is admitted",
        lambda: edited_function(version_choice.is_admitted, "rule.ceiling is None or version <= rule.ceiling", "True"),
        seeds=(22,),
    ),
)

PROTECTION_MUTANTS: tuple[Mutant, ...] = (
    Mutant("parity that a home could not make counts", _count_failed_parity, seeds=(62,)),
    Mutant(
        "a checkpoint counts as stored when one vault has written its part",
        lambda: edited_function(storage._written, "if report.complete:", "if True:"),
        seeds=(1,),
    ),
    Mutant(
        "protected versions are not pinned",
        lambda: replaced_method(JobRecord, "pinned_versions", lambda job: ()),
        seeds=(102,),
    ),
    Mutant("orders to vaults are never repeated", _never_repeat_orders, seeds=(16,)),
)
