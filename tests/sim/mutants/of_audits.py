"""Mistakes about audits of training."""

from __future__ import annotations

from everstep_controller.core.checkpoints import commits, parity
from everstep_controller.core.health import audit_outcomes, audits

from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.surgery import method_mistaken, mistaken, swapped

OF_AUDITS: tuple[Mutant, ...] = (
    Mutant(
        "after a conviction the newest committed version is restored",
        lambda: mistaken(commits.roll_back_before, "if to_audited and kept else", "if False else"),
        seeds=(16,),
    ),
    Mutant(
        "the owner is blamed for what its auditor got wrong",
        lambda: mistaken(audit_outcomes._settle_audit, "case, case.spec.node_of(judgement.rank)", "case, owner"),
        seeds=(16,),
    ),
    Mutant(
        "whoever differs from one other rank is convicted",
        lambda: mistaken(audits._judge_pair, "return Tied((owner.rank, witness.rank), ", "return OwnerConvicted("),
        seeds=(15,),
    ),
    Mutant(
        "two ranks of one node convict another node",
        lambda: method_mistaken(audits._Arbitration, "_speak_for_one_node", "len(nodes) == 1", "False"),
        seeds=(180,),
    ),
    Mutant(
        "a version is verified once one rank was audited",
        lambda: mistaken(
            audits.handle_audits_clean, "len(audits.clean_ranks) == spec.world_size", "audits.clean_ranks"
        ),
        seeds=(3,),
    ),
    Mutant(
        "a convicted node that stays spoils what a regroup restores",
        lambda: swapped(commits._convicted_seats, lambda transition, job, spec: []),
        seeds=(177,),
    ),
    Mutant(
        "the version that audits have verified is not kept",
        lambda: mistaken(parity.pinned_versions, "(job.commits.audited, job.commits.audit_candidate)", "()"),
        seeds=(15,),
    ),
)
