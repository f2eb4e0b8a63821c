"""A node that takes no copies stops commits for a few versions only: then copies go elsewhere."""

from __future__ import annotations

from everstep.vocabulary import FindingKind, GenerationReason
from everstep_controller.core.effects import PutVersion
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences

POLICY = CorePolicy.lab_preset().with_values(checkpoints={"missed_copies_count": 3, "replica_node_skip_s": 60.0})
KEY = f"{FindingKind.COPIES_MISSING}/copies/job"


def _fleet(nodes: int = 4, **spec: int) -> CoreFleet:
    fleet = CoreFleet(POLICY)
    fleet.start(nodes, **({"replicas": 2, "min_nodes": 2} | spec))
    return fleet


def _next_version(fleet: CoreFleet, *broken: str) -> bool:
    """The job comes to its next candidate, of which ``broken`` get no copies. Returns whether it is committed."""
    live, spec, before = fleet.state.job_runtime["job"], fleet.running(), len(fleet.effects)
    step = (
        live.commits.candidate_step
        if live.commits.candidate_step is not None
        else fleet.state.job_runtime["job"].progress.furthest_step or 1
    )
    fleet.progress(step=step, step_s=0.1)
    for member in spec.roster:
        replica_nodes = spec.replica_nodes[member.node]
        arrived = tuple(copy for copy in replica_nodes if copy not in broken)
        fleet.seal_one(step, member.rank, durable=arrived == replica_nodes, full_copies=arrived)
    for _ in range(8):
        fleet.advance(0.5, *fleet.state.nodes)
        step += 4
        fleet.progress(step=step, step_s=0.1)
    return any(isinstance(effect, PutVersion) for effect in fleet.effects[before:])


def _replica_nodes(fleet: CoreFleet) -> set[str]:
    return {copy for replica_nodes in fleet.spec().replica_nodes.values() for copy in replica_nodes}


def test_replicas_move_after_consecutive_missed_versions() -> None:
    fleet = _fleet()
    assert _next_version(fleet)
    assert [_next_version(fleet, "n2") for _ in range(3)] == [False] * 3
    spec = generations(fleet.effects)[-1]
    assert (spec.number, spec.reason, spec.after_step is not None) == (2, GenerationReason.PLACEMENT, True)
    assert spec.seated_nodes == {"n1", "n2", "n3", "n4"}
    assert "n2" not in _replica_nodes(fleet)
    assert all(len(replica_nodes) == 1 for replica_nodes in spec.replica_nodes.values())
    assert (
        "copies no longer go to n2, which missed 3 versions in a row"
        in logged_sentences(fleet.effects, "generation")[-1]
    )
    assert KEY in fleet.state.nodes["n2"].health.controller_findings
    assert decisions(fleet.effects) == [("n2", "no_action")]


def test_failing_replica_node_is_reported_without_alternative() -> None:
    fleet = _fleet(2)
    for _ in range(8):
        assert not _next_version(fleet, "n2")
    assert fleet.spec().number == 1
    assert KEY in fleet.state.nodes["n2"].health.controller_findings


def test_replica_node_is_skipped_for_limited_time() -> None:
    fleet = _fleet()
    for _ in range(3):
        _next_version(fleet, "n2")
    assert "n2" not in _replica_nodes(fleet)
    fleet.resume(step=500)
    for _ in range(140):
        fleet.advance(0.5, *fleet.state.nodes)
    fleet.lose_rank(0)
    assert fleet.state.job_runtime["job"].commits.skipped_replica_nodes == {}
    assert KEY not in fleet.state.nodes["n2"].health.controller_findings
