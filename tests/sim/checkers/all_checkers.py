"""The list of all checkers, in the order in which they get observations."""

from __future__ import annotations

from tests.sim.checkers.checker import Checker
from tests.sim.checkers.checkpoints.audited_restores import AuditedRestores
from tests.sim.checkers.checkpoints.committed_copies import CommittedCopies
from tests.sim.checkers.checkpoints.parity_protection import ParityProtection
from tests.sim.checkers.checkpoints.replica_placement import ReplicaPlacement
from tests.sim.checkers.checkpoints.restores import Restores
from tests.sim.checkers.checkpoints.spills import Spills
from tests.sim.checkers.fleet.durability import Durability
from tests.sim.checkers.fleet.leader_replacement import LeaderReplacement
from tests.sim.checkers.fleet.recovery import Recovery
from tests.sim.checkers.health.blame_isolation import BlameIsolation
from tests.sim.checkers.health.eviction_budget import EvictionBudgets
from tests.sim.checkers.health.eviction_evidence import EvictionEvidence
from tests.sim.checkers.health.maintenance_windows import MaintenanceWindows
from tests.sim.checkers.health.node_loss import NodeLoss
from tests.sim.checkers.health.node_states import NodeStates
from tests.sim.checkers.health.quarantine import Quarantine
from tests.sim.checkers.health.remediations import Remediations
from tests.sim.checkers.health.return_to_service import ReturnToService
from tests.sim.checkers.health.suspicion import Suspicion
from tests.sim.checkers.jobs.fencing import Fencing
from tests.sim.checkers.jobs.generation_changes import GenerationChanges
from tests.sim.checkers.jobs.generations import Generations
from tests.sim.checkers.jobs.job_states import JobStates
from tests.sim.checkers.jobs.mesh_blocks import MeshBlocks
from tests.sim.checkers.jobs.samples import Samples


def all_checkers() -> list[Checker]:
    """Return a new instance of each checker."""
    return [
        Generations(),
        JobStates(),
        MeshBlocks(),
        ReplicaPlacement(),
        Fencing(),
        GenerationChanges(),
        Restores(),
        AuditedRestores(),
        CommittedCopies(),
        EvictionBudgets(),
        EvictionEvidence(),
        BlameIsolation(),
        ReturnToService(),
        Quarantine(),
        NodeStates(),
        Suspicion(),
        NodeLoss(),
        Durability(),
        Samples(),
        MaintenanceWindows(),
        Remediations(),
        Spills(),
        ParityProtection(),
        LeaderReplacement(),
        Recovery(),
    ]
