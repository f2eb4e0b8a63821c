"""A node that takes no copies stops commits for a few versions only: then copies go elsewhere."""

from __future__ import annotations

import msgspec
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas
from everstep_controller.core.effects import PutVersion
from everstep_controller.core.policy import CorePolicy
from hypothesis import given
from hypothesis import strategies as st

from everstep.vocabulary import FindingKind, GenerationReason
from tests.support.core_fleet import CoreFleet, audits, decisions, generations

POLICY = msgspec.structs.replace(CorePolicy.lab_preset(), missed_copies_count=3, replica_node_skip_s=60.0)
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
        homes = spec.replica_nodes[member.node]
        arrived = tuple(home for home in homes if home not in broken)
        fleet.seal_one(step, member.rank, durable=arrived == homes, full_copies=arrived)
    for _ in range(8):
        fleet.advance(0.5, *fleet.state.nodes)
        step += 4
        fleet.progress(step=step, step_s=0.1)
    return any(isinstance(effect, PutVersion) for effect in fleet.effects[before:])


def _homes(fleet: CoreFleet) -> set[str]:
    return {home for homes in fleet.spec().replica_nodes.values() for home in homes}


def test_replicas_move_after_consecutive_missed_versions() -> None:
    fleet = _fleet()
    assert _next_version(fleet)
    assert [_next_version(fleet, "n2") for _ in range(3)] == [False] * 3
    spec = generations(fleet.effects)[-1]
    assert (spec.number, spec.reason, spec.after_step is not None) == (2, GenerationReason.PLACEMENT, True)
    assert spec.seated_nodes == {"n1", "n2", "n3", "n4"}
    assert "n2" not in _homes(fleet)
    assert all(len(homes) == 1 for homes in spec.replica_nodes.values())
    assert "copies no longer go to n2, which missed 3 versions in a row" in audits(fleet.effects, "generation")[-1]
    assert KEY in fleet.state.nodes["n2"].health.controller_findings
    assert decisions(fleet.effects) == [("n2", "no_action")]


def test_completed_version_resets_missed_copy_count() -> None:
    fleet = _fleet()
    for _ in range(3):
        assert not _next_version(fleet, "n2")
        assert not _next_version(fleet, "n2")
        assert _next_version(fleet)
    assert fleet.spec().number == 1


def test_uncopied_version_is_no_missed_copy() -> None:
    """Every generation whose first versions were compared before one was to be kept accused all of its homes."""
    fleet = _fleet()
    for step in range(1, 7):
        fleet.seal(step, commit_candidate=False)
    fleet.progress(step=6, step_s=0.1)
    for _ in range(20):
        fleet.advance(0.5, *fleet.state.nodes)
    assert fleet.spec().number == 1
    assert decisions(fleet.effects) == []
    assert not any(node.health.controller_findings for node in fleet.state.nodes.values())


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
    assert "n2" not in _homes(fleet)
    fleet.resume(step=500)
    for _ in range(140):
        fleet.advance(0.5, *fleet.state.nodes)
    fleet.lose_rank(0)
    assert fleet.state.job_runtime["job"].commits.skipped_replica_nodes == {}
    assert KEY not in fleet.state.nodes["n2"].health.controller_findings


@given(st.lists(st.sampled_from(["", "r1", "r2", "r3"]), min_size=3, max_size=8), st.data())
def test_placement_avoids_skipped_nodes_at_full_replica_count(racks: list[str], data: st.DataObject) -> None:
    sites = {f"n{at}": FailureDomains(rack=rack) for at, rack in enumerate(racks)}
    copies = data.draw(st.integers(1, 2))
    most = len(racks) - copies - 1
    over = data.draw(st.sets(st.sampled_from(sorted(sites)), max_size=max(0, most)))
    placed = place_replicas(list(sites), sites, copies + 1, skipped=frozenset(over))
    for node, homes in placed.items():
        assert len(set(homes) - over - {node}) == min(copies, len(racks) - 1)
        others = [one for one in sites if one not in over and one != node]
        apart = [one for one in others if not sites[one].count_shared(sites[node])]
        assert copies > 1 or not sites[homes[0]].count_shared(sites[node]) or not apart
