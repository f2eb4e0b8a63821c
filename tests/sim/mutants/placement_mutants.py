"""Mutants of the placement of blocks and copies."""

from __future__ import annotations

from everstep_controller.core.checkpoints import placement, restore_points
from everstep_controller.core.seats import membership
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.patching import edited_function, edited_method

PLACEMENT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "blocks may leave their domain",
        lambda: edited_function(membership.seats_among, "if within:", "if False:"),
        seeds=(16, 50),
    ),
    Mutant(
        "a seat of a block is filled by a spare of another domain",
        lambda: edited_function(
            membership.choose_seats,
            "_filled(kept_block.seats, free[kept_block.domain])",
            "_filled(kept_block.seats, max(free.values(), key=len))",
        ),
        seeds=(50, 99),
    ),
    Mutant(
        "the place of the second copy is ignored for the third",
        lambda: edited_method(
            placement._ReplicaPlacer,
            "_near",
            "sum(site.count_shared(holder) for holder in holders)",
            "site.count_shared(holders[0])",
        ),
        seeds=(41, 73),
    ),
    Mutant(
        "power units are ignored when copies are placed",
        lambda: edited_method(
            placement.FailureDomains, "count_shared", '+ (self.power == other.power and self.power != "")', ""
        ),
        seeds=(51, 56),
    ),
    Mutant(
        "a loss forecast promises one survivable loss too many",
        lambda: edited_method(
            restore_points._VersionShares,
            "_is_lost",
            "min(self._replicas - 1, others)",
            "min(self._replicas, others + 1)",
        ),
        seeds=(56,),
    ),
)
