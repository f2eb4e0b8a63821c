"""Mutants of the audits of training."""

from __future__ import annotations

from everstep_controller.core.checkpoints import commits
from everstep_controller.core.judgement import audit_outcomes, audits
from everstep_controller.core.records import JobRecord
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.patching import edited_function, edited_method, replaced_function

AUDIT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "after a failed audit the newest committed version is restored",
        lambda: edited_function(commits.roll_back_before, "if to_audited and kept else", "if False else"),
        seeds=(16,),
    ),
    Mutant(
        "the owner is blamed for its auditor's error",
        lambda: edited_function(audit_outcomes._settle_audit, "case, case.spec.node_of(judgement.rank)", "case, owner"),
        seeds=(16,),
    ),
    Mutant(
        "a rank that differs from one other rank is evicted",
        lambda: edited_function(
            audits._judge_pair, "return Tied((owner.rank, witness.rank), ", "return OwnerConvicted("
        ),
        seeds=(15,),
    ),
    Mutant(
        "two ranks of one node evict another node",
        lambda: edited_method(audits._Arbitration, "_speak_for_one_node", "len(nodes) == 1", "False"),
        seeds=(180,),
    ),
    Mutant(
        "a version is verified once one rank was audited",
        lambda: edited_function(
            audits.handle_audits_clean, "len(audits.clean_ranks) == spec.world_size", "audits.clean_ranks"
        ),
        seeds=(3,),
    ),
    Mutant(
        "a regroup restores a version of a divergent node that stays",
        lambda: replaced_function(commits._convicted_seats, lambda transition, job, spec: []),
        seeds=(177,),
    ),
    Mutant(
        "the version that audits have verified is not kept",
        lambda: edited_method(
            JobRecord, "pinned_versions", ", self.commits.audited, self.commits.audit_candidate)", ",)"
        ),
        seeds=(15,),
    ),
)
