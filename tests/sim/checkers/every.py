"""All checkers, in the order in which they look."""

from __future__ import annotations

from tests.sim.checkers.audits import Audits
from tests.sim.checkers.blame import Blame
from tests.sim.checkers.budget import Budget
from tests.sim.checkers.checker import Checker
from tests.sim.checkers.copies import Copies
from tests.sim.checkers.durability import Durability
from tests.sim.checkers.evidence import Evidence
from tests.sim.checkers.fencing import Fencing
from tests.sim.checkers.generations import Generations
from tests.sim.checkers.job_states import JobStates
from tests.sim.checkers.meshes import Meshes
from tests.sim.checkers.node_states import NodeStates
from tests.sim.checkers.paces import Paces
from tests.sim.checkers.passages import Passages
from tests.sim.checkers.placing import Placing
from tests.sim.checkers.protection import Parities
from tests.sim.checkers.reached import Reached
from tests.sim.checkers.recovery import Recovery
from tests.sim.checkers.remedies import Remedies
from tests.sim.checkers.restores import Restores
from tests.sim.checkers.returns import Returns
from tests.sim.checkers.samples import Samples
from tests.sim.checkers.silences import Silences
from tests.sim.checkers.spills import Spills
from tests.sim.checkers.suspicion import Suspicion
from tests.sim.checkers.ways_out import WaysOut
from tests.sim.checkers.windows import Windows


def all_checkers() -> list[Checker]:
    """A fresh one of each."""
    return [
        Generations(),
        JobStates(),
        Meshes(),
        Placing(),
        Fencing(),
        Passages(),
        Restores(),
        Audits(),
        Copies(),
        Budget(),
        Evidence(),
        Blame(),
        Returns(),
        WaysOut(),
        NodeStates(),
        Suspicion(),
        Silences(),
        Paces(),
        Durability(),
        Samples(),
        Windows(),
        Remedies(),
        Spills(),
        Parities(),
        Reached(),
        Recovery(),
    ]
