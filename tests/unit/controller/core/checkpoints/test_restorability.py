"""The version that a job would restore now, and the losses that it could not survive."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.operator import LossForecast, Restorability
from everstep_controller.core.checkpoints.restore_points import compute_restorability
from tests.support.fleet.core_fleet import CoreFleet

Kept = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Node to (copies, alike) of what its ranks seal."""


def _fleet(racks: str, min_nodes: int = 1, **spec: Any) -> CoreFleet:
    """A node in each of the racks named."""
    fleet = CoreFleet()
    for at, rack in enumerate(racks):
        fleet.register(f"n{at + 1}", domain=Domain(rack=rack))
        fleet.beat(f"n{at + 1}")
    nodes = [f"n{at + 1}" for at in range(len(racks))]
    fleet.join(*nodes, min_nodes=min_nodes, max_nodes=len(racks), **spec)
    fleet.resume()
    return fleet


def _commit(fleet: CoreFleet, kept: Kept, step: int = 5) -> None:
    """Let every rank seal the version, and report the other holders of its share."""
    for member in fleet.spec().roster:
        copies, alike = kept.get(member.node, ((), ()))
        fleet.seal_one(step, member.rank, full_copies=copies, partial_copies=alike)


def _ask(fleet: CoreFleet) -> Restorability:
    answer = compute_restorability(fleet.state, fleet.job())
    msgspec.json.decode(msgspec.json.encode(answer), type=Restorability)
    return answer


def _of(answer: Restorability, kind: str, name: str) -> LossForecast:
    return next(forecast for forecast in answer.loss_forecasts if (forecast.kind, forecast.name) == (kind, name))


PAIRED: Kept = {"n1": (("n3",), ()), "n2": (("n4",), ()), "n3": (("n1",), ()), "n4": (("n2",), ())}


def test_node_and_its_replica_are_reported_as_fatal_pair() -> None:
    fleet = _fleet("aabb", nproc_per_node=2)
    _commit(fleet, PAIRED)
    answer = _ask(fleet)
    fatal = [forecast.nodes for forecast in answer.loss_forecasts if not forecast.restorable]
    assert fatal == [("n1", "n3"), ("n2", "n4")]
    assert answer.loss_forecasts[0].nodes == ("n1", "n3"), "what would cost something comes first"
    assert answer.loss_forecasts[0].ranks == (0, 1, 4, 5)
    assert "the state of the ranks on n1, n3 at version 1:5 may be lost" in answer.loss_forecasts[0].sentence
    assert answer.sentence.endswith("2 pairs cannot be spared, such as n1 and n3")


def test_exposure_reports_job_continuation_separately() -> None:
    fleet = _fleet("aabb", min_nodes=3)
    _commit(fleet, PAIRED)
    answer = _ask(fleet)
    assert _of(answer, "node", "n1").remaining_nodes == 3
    assert _of(answer, "rack", "a").remaining_nodes == 0
    assert _of(answer, "rack", "a").sentence.endswith("fewer than 3 nodes are left and the job is paused")


def test_restorability_before_first_commit_has_no_version() -> None:
    fleet = _fleet("ab")
    assert (
        _ask(fleet).sentence
        == "nothing of job job is committed yet: after a loss the newest complete version in the vaults is restored"
    )


def test_restorability_reports_ceiling_after_corruption() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(4)
    fleet.seal(6, digests={2: "bad"})
    assert _ask(fleet).ceiling == Version(1, 4)


def test_ranks_without_reachable_holder_are_reported_missing() -> None:
    fleet = _fleet("aabb")
    _commit(fleet, PAIRED)
    for node in ("n1", "n3"):
        fleet.disconnect(node)
    fleet.advance(40.0, "n2", "n4")
    answer = _ask(fleet)
    assert answer.missing_ranks == (0, 2)
    assert (
        "version 1:5 cannot be restored now: no reachable node has the state of the ranks on n1, n3" in answer.sentence
    )


@pytest.mark.promise("restorability")
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), max_size=3), st.booleans()), min_size=5, max_size=5),
    st.integers(1, 3),
)
def test_restorability_matches_exhaustive_share_search(kept: list[tuple[set[int], bool]], replicas: int) -> None:
    fleet = _fleet("aabbc", replicas=replicas)
    nodes = fleet.seats()
    others = {node: tuple(nodes[o] for o in sorted(kept[at][0]) if nodes[o] != node) for at, node in enumerate(nodes)}
    copied = {node: kept[at][1] for at, node in enumerate(nodes)}
    _commit(fleet, {n: (others[n], ()) if copied[n] else ((), others[n]) for n in nodes})
    answer = _ask(fleet)
    for forecast in answer.loss_forecasts:
        assert forecast.restorable == _whole(nodes, others, copied, replicas, set(forecast.nodes)), forecast
    pairs = {forecast.nodes for forecast in answer.loss_forecasts if forecast.kind == "pair"}
    alone = {forecast.name for forecast in answer.loss_forecasts if forecast.kind == "node" and forecast.restorable}
    assert pairs == {pair for pair in combinations(nodes, 2) if alone.issuperset(pair)}


def _whole(
    nodes: list[str], others: dict[str, tuple[str, ...]], copied: dict[str, bool], replicas: int, lost: set[str]
) -> bool:
    """Every part of every share is on a node that is left, whichever of the possible holders a part is on."""
    for node in nodes:
        if replicas == 1 and node in lost:
            return False
        if not others[node]:
            holders = [{node, *rest} for rest in combinations([n for n in nodes if n != node], replicas - 1)]
        elif copied[node]:
            holders = [{node, *others[node]}]
        else:
            count = min(replicas - 1, len(others[node]))
            holders = [{node, *rest} for rest in combinations(others[node], count)]
        if any(some <= lost for some in holders):
            return False
    return True
