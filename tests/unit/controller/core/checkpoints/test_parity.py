"""Parity of committed versions: the nodes that make it, when it counts, and the restored version."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.errors import NotFound, StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.wire.v1.directives import ProtectVersion, StopJob, VersionNotice
from everstep.wire.v1.vault_reports import VersionProtected
from everstep_controller.core.checkpoints.restore_points import compute_restorability
from everstep_controller.core.effects import Effect
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences, sent

SIX = tuple(f"n{at + 1}" for at in range(6))


def _fleet(nodes: int = 6, **spec: Any) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, **({"parity_group_size": 4, "min_nodes": 4} | spec))
    return fleet


def _commit(fleet: CoreFleet, step: int, **options: Any) -> list[Effect]:
    fleet.progress(step)
    fleet.state.job_runtime["job"].commits.candidate_step = step
    return fleet.seal(step, **options)


def _made(fleet: CoreFleet, node: str, order: ProtectVersion, members: str = "m", **fields: Any) -> list[Effect]:
    made = {} if "code" in fields else {group.group: members for group in order.groups}
    return fleet.report(
        node, VersionProtected(job="job", at=fleet.now, version=order.version, **({"members_digests": made} | fields))
    )


def _protect(fleet: CoreFleet, step: int, **options: Any) -> Version:
    """Commit a version, and report its parity from every parity node."""
    orders: dict[str, ProtectVersion] = sent(_commit(fleet, step, **options), ProtectVersion)
    assert orders
    for node, order in orders.items():
        _made(fleet, node, order)
    return order.version


@pytest.mark.promise("parity")
def test_parity_of_differing_members_is_abandoned() -> None:
    fleet = _fleet()
    *others, last = sent(_commit(fleet, 10), ProtectVersion).items()
    for node, order in others:
        _made(fleet, node, order, members="a")
    effects = _made(fleet, *last, members="b")
    assert fleet.job().parity.active is None
    assert "different shards" in logged_sentences(effects, "parity.given_up")[0]


def test_previous_parity_version_stays_until_next_is_complete() -> None:
    fleet = _fleet()
    old = _protect(fleet, 10)
    fleet.advance(fleet.policy.checkpoints.parity_interval_s + 0.1, *SIX)
    effects = _commit(fleet, 40)
    orders = sent(effects, ProtectVersion)
    assert {order.keep for order in orders.values()} == {(old,)}
    assert sent(effects, VersionNotice)["n1"].pinned == (old, Version(1, 40))
    shielded = fleet.job().parity.active
    assert shielded is not None
    assert shielded.protection.version == old
    for node, order in orders.items():
        _made(fleet, node, order)
    assert sent(_commit(fleet, 60), VersionNotice)["n1"].pinned == (Version(1, 40),)


def test_parity_is_abandoned_and_regrouped_after_node_loss() -> None:
    fleet = _fleet()
    _commit(fleet, 10)
    fleet.disconnect("n6")
    fleet.advance(30, *SIX[:5])
    assert fleet.job().parity.pending is None
    assert len(fleet.seats()) == 5
    fleet.resume(step=11)
    fleet.advance(fleet.policy.checkpoints.vault_order_retry_max_s, *SIX[:5])
    orders = sent(_commit(fleet, 50), ProtectVersion)
    assert {len(group.members) for order in orders.values() for group in order.groups} == {2, 3}


@pytest.mark.parametrize("code", [NotFound.code, Unavailable.code])
def test_failed_parity_is_abandoned_and_delayed(code: str) -> None:
    fleet = _fleet()
    node, order = next(iter(sent(_commit(fleet, 10), ProtectVersion).items()))
    for _ in range(1 if code == NotFound.code else fleet.policy.checkpoints.vault_order_failures):
        assert fleet.job().parity.pending is not None
        _made(fleet, node, order, code=code, message="no")
    assert fleet.job().parity.pending is None
    assert not sent(_commit(fleet, 11), ProtectVersion)


def test_stale_generation_answers_do_not_count_as_failures() -> None:
    fleet = _fleet()
    node, order = next(iter(sent(_commit(fleet, 10), ProtectVersion).items()))
    for _ in range(20):
        _made(fleet, node, order, code=StaleGeneration.code, message="over")
    assert fleet.job().parity.pending is not None


def test_restore_rule_names_the_parity_version() -> None:
    fleet = _fleet()
    version = _protect(fleet, 10)
    fleet.lose_rank(0)
    rule = fleet.spec().restore
    assert rule.protection is not None
    assert rule.protection.version == version
    assert rule.protection.seats == SIX
    assert rule.pinned == (version,)


def test_ungrouped_nodes_are_named_and_counted_as_exposed() -> None:
    fleet = _fleet(5, parity_group_size=2, replicas=1)
    effects = _commit(fleet, 10)
    alone = logged_sentences(effects, "parity.grouped")[0]
    for node, order in sent(effects, ProtectVersion).items():
        _made(fleet, node, order)
    forecasts = {
        forecast.name: forecast.restorable
        for forecast in compute_restorability(fleet.state, fleet.job()).loss_forecasts
        if forecast.kind == "node"
    }
    assert alone.endswith("; n5 have neither parity nor a copy")
    assert {node for node, whole in forecasts.items() if not whole} == {"n5"}


def test_parity_of_possibly_corrupt_version_is_dropped() -> None:
    fleet = _fleet(3 + 3)
    _protect(fleet, 10)
    fleet.lose_rank(0)
    fleet.resume(step=11)
    fleet.seal(12, commit_candidate=False, digests=dict.fromkeys(range(6), "d0") | {5: "liar"})
    assert fleet.job().parity.active is not None, "it is what is known to be clean"
    fleet.state.job_runtime["job"].commits.committed_version = fleet.state.job_runtime[
        "job"
    ].commits.verified_version = None
    fleet.resume(step=13)
    fleet.seal(14, commit_candidate=False, digests=dict.fromkeys(range(fleet.spec().world_size), "d0") | {0: "liar"})
    assert fleet.job().parity.active is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"parity_group_size": 1, "max_nodes": 4}, "parity of one member"),
        ({"parity_group_size": 4, "max_nodes": 3}, "parity needs 4 nodes"),
        ({"parity_group_size": 4, "max_nodes": 6, "min_nodes": 3, "replicas": 1}, "continues with 3"),
    ],
)
def test_impossible_parity_settings_are_refused(spec: dict[str, Any], text: str) -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.beat("n1")
    fleet.join("n1", **spec)
    assert "job" not in fleet.state.jobs
    assert text in sent(fleet.effects, StopJob)["n1"].reason
