"""Mistakes about where blocks and copies are."""

from __future__ import annotations

from everstep_controller.core.checkpoints import placement, restore_points
from everstep_controller.core.jobs import membership

from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.surgery import method_mistaken, mistaken

OF_PLACES: tuple[Mutant, ...] = (
    Mutant(
        "blocks may leave their domain",
        lambda: mistaken(membership.seats_among, "if within:", "if False:"),
        seeds=(16, 50),
    ),
    Mutant(
        "a seat of a block is filled by a spare of another domain",
        lambda: mistaken(
            membership.choose_seats,
            "_filled(one.seats, free[one.domain])",
            "_filled(one.seats, max(free.values(), key=len))",
        ),
        seeds=(50, 99),
    ),
    Mutant(
        "the third copy is placed without a look at the second",
        lambda: method_mistaken(
            placement._ReplicaPlacer,
            "_near",
            "sum(site.count_shared(holder) for holder in holders)",
            "site.count_shared(holders[0])",
        ),
        seeds=(41, 73),
    ),
    Mutant(
        "power units are not looked at when copies are placed",
        lambda: method_mistaken(
            placement.FailureDomains, "count_shared", '+ (self.power == other.power and self.power != "")', ""
        ),
        seeds=(51, 56),
    ),
    Mutant(
        "one loss more is said to be survived",
        lambda: method_mistaken(
            restore_points._VersionShares,
            "_is_lost",
            "min(self._replicas - 1, others)",
            "min(self._replicas, others + 1)",
        ),
        seeds=(56,),
    ),
)
