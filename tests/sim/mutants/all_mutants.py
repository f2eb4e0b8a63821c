"""The list of all mutants.

A checker must detect each mutant within the default seeds. A mutant's own ``seeds`` are worlds in which a checker has
detected it before. They are played first, so that the tests stay quick. If a change of the code alters these worlds,
the other ones are played as well.
"""

from __future__ import annotations

from tests.sim.mutants.audit_mutants import AUDIT_MUTANTS
from tests.sim.mutants.checkpoint_mutants import COMMIT_MUTANTS, PROTECTION_MUTANTS
from tests.sim.mutants.controller_mutants import MESSAGE_MUTANTS, TAKEOVER_MUTANTS
from tests.sim.mutants.generation_mutants import GENERATION_MUTANTS
from tests.sim.mutants.health_mutants import HEALTH_MUTANTS
from tests.sim.mutants.job_mutants import MEMBERSHIP_MUTANTS, SAMPLE_MUTANTS
from tests.sim.mutants.maintenance_mutants import MAINTENANCE_MUTANTS
from tests.sim.mutants.mutant import Mutant
from tests.sim.mutants.placement_mutants import PLACEMENT_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *HEALTH_MUTANTS,
    *MEMBERSHIP_MUTANTS,
    *COMMIT_MUTANTS,
    *MESSAGE_MUTANTS,
    *PROTECTION_MUTANTS,
    *SAMPLE_MUTANTS,
    *TAKEOVER_MUTANTS,
    *AUDIT_MUTANTS,
    *MAINTENANCE_MUTANTS,
    *PLACEMENT_MUTANTS,
    *GENERATION_MUTANTS,
)
