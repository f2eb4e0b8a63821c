"""The controller's own findings, which are judged by rules as agents' findings are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, FindingKind, Mode, NodeState
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.effects import RequestRemediation
from everstep_controller.core.events import ProbeRequested
from everstep_controller.core.jobs.stragglers import STRAGGLER_KEY as SLOW
from everstep_controller.core.policy import CorePolicy, Rulebook
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet.core_fleet import CoreFleet, decisions
from tests.support.fleet.findings import xid


def _policy(kind: FindingKind, knobs: dict[str, Any] | None = None, **keys: Any) -> CorePolicy:
    """The lab's policy with other ``knobs``, and other ``keys`` in the kind's nameless rule."""
    policy = with_rules(CorePolicy.lab_preset())
    kinds = dict(policy.rules.rules_by_kind)
    kinds[kind] = (*kinds[kind][:-1], msgspec.structs.replace(kinds[kind][-1], **keys))
    quick: dict[str, dict[str, float]] = {
        "stragglers": {"windows": 5, "count": 4},
        "regroups": {"rank_flap_count": 3, "failure_window_s": 20.0},
    }
    policy = msgspec.structs.replace(policy, rules=Rulebook(kinds))
    return policy.with_values(**quick).with_values(**(knobs or {}))


def _fleet(policy: CorePolicy, nodes: int = 4, spares: int = 1, **spec: int) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.start(nodes, spares, **spec)
    return fleet


def _slow(fleet: CoreFleet, seconds: int, rank: int = 1) -> list[tuple[str, str]]:
    """The job steps for so long, and waits for one rank."""
    before = len(fleet.effects)
    fleet.train(seconds, {rank: 4.0})
    return decisions(fleet.effects[before:])


def _flap(fleet: CoreFleet, job: str = "job") -> list[tuple[str, str]]:
    """The job's first rank is lost three times."""
    before = len(fleet.effects)
    for _ in range(3):
        fleet.lose_rank(0, job=job)
    return decisions(fleet.effects[before:])


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
def test_straggler_is_replaced_in_observe_and_recommend_mode(mode: Mode) -> None:
    fleet = _fleet(_policy(FindingKind.RANK_STRAGGLER, mode=mode))
    decided = _slow(fleet, 14)
    assert decided == ([("n2", "recommend")] if mode is Mode.RECOMMEND else [])
    assert fleet.seats() == ["n1", "n5", "n3", "n4"]
    assert fleet.node_state("n2") is NodeState.HEALTHY


@pytest.mark.promise("rules-have-sources")
def test_straggler_eviction_is_deferred_then_dropped() -> None:
    fleet = _fleet(_policy(FindingKind.RANK_STRAGGLER, mode=Mode.ENFORCE), spares=0, min_nodes=4)
    assert _slow(fleet, 14) == [("n2", "defer_eviction")]
    assert fleet.state.nodes["n2"].health.deferred_eviction_key == SLOW
    fleet.train(24, {})
    assert fleet.state.evictions.deferred == {}
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_divergent_node_is_not_reported_in_observe_mode() -> None:
    fleet = _fleet(_policy(FindingKind.DIGEST_MISMATCH, mode=Mode.OBSERVE))
    fleet.seal(10)
    assert decisions(fleet.seal(11, digests={1: "bad"})) == []
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert fleet.spec().reason == "corruption", "what is restored is no question of blame"


@pytest.mark.promise("rules-have-sources")
def test_flapping_on_many_nodes_is_judged_correlated() -> None:
    fleet = CoreFleet(_policy(FindingKind.RANK_FLAPPING, mode=Mode.ENFORCE))
    nodes = [f"n{number}" for number in range(1, 9)]
    fleet.register(*nodes)
    decided = []
    for number in range(0, 8, 2):
        job = f"job{number}"
        fleet.join(*nodes[number : number + 2], job=job, min_nodes=1, max_nodes=2)
        fleet.resume(job=job)
        decided += _flap(fleet, job)
    assert [decision for _, decision in decided] == ["evict", "evict", *["correlated"] * 4]
    assert [node for node, _ in decided].count("n1") == [node for node, _ in decided].count("n3") == 2  # and taken back
    assert fleet.node_state("n1") is fleet.node_state("n3") is NodeState.PROBATION


def test_failing_partner_is_not_evicted_in_recommend_mode() -> None:
    fleet = _fleet(_policy(FindingKind.PROBE_FAILED, mode=Mode.RECOMMEND))
    fleet.raise_finding("n2", xid())
    fleet.clear_finding("n2", xid().key)
    fleet.advance(2.5, *fleet.state.nodes)
    tried = next(probe for probe in fleet.state.diagnostics.probes.values() if probe.tested_node == "n2")
    partner = next(node for node in tried.nodes if node != "n2")
    decisions(fleet.finish_probe("n2", ok=False))
    decisions(fleet.finish_probe(partner, ok=False))
    assert (partner, "recommend") in decisions(fleet.finish_probe("n2", ok=True))
    assert fleet.node_state(partner) is NodeState.HEALTHY


def test_second_divergent_node_is_deferred_by_job_budget() -> None:
    fleet = _fleet(_policy(FindingKind.DIGEST_MISMATCH, {"budget": {"job_count": 1}}), nodes=2, spares=1)
    fleet.pass_solo_diagnostics = False
    fleet.seal(4)
    fleet.seal(5, digests={0: "x", 1: "y"})
    for node in ("n1", "n2"):
        name = next(name for name, probe in fleet.state.diagnostics.probes.items() if probe.tested_node == node)
        fleet.report(node, ProbeFinished(probe=name, ok=False, wrong_result=True, detail="a product came out wrong"))
    assert [decision for _, decision in decisions(fleet.effects)][-2:] == ["evict", "defer_eviction"]
    assert fleet.seats() == ["n3", "n2"]


def test_slow_link_node_is_readmitted_after_clear_time() -> None:
    fleet = _fleet(
        _policy(
            FindingKind.NETWORK_SLOW_LINK,
            {"probes": {"slow_link_bytes_per_s": 1e9, "required": False}, "budget": {"count": 10}},
            boot_grace_s=0.0,
            clear_s=5.0,
        )
    )
    fleet.feed(ProbeRequested(nodes=("n1", "n2"), actor="ada"))
    name = next(iter(fleet.state.diagnostics.probes))
    fleet.report("n1", ProbeFinished(probe=name, ok=True, rows=((1 << 20, 0.01, 4e8),)))
    decisions(fleet.finish_probe("n2", ok=True))
    assert decisions(fleet.finish_probe("n1", ok=False)) == [("n1", "evict")]
    fleet.advance(6.0, *fleet.state.nodes)
    assert fleet.node_state("n1") is NodeState.QUARANTINED, "clear for 5 s since it was not seen again after 2"
    fleet.advance(8.0, *fleet.state.nodes)
    assert fleet.node_state("n1") is NodeState.HEALTHY


def _fail_diagnostics(fleet: CoreFleet, **answer: Any) -> None:
    """The node's next memory check comes to this end."""
    for _ in range(100):
        if any(probe.tested_node == "n2" for probe in fleet.state.diagnostics.probes.values()):
            break
        fleet.advance(1.0, *fleet.state.nodes)
    name = next(name for name, probe in fleet.state.diagnostics.probes.items() if probe.tested_node == "n2")
    fleet.report("n2", ProbeFinished(probe=name, ok=False, started=True, detail="no memory left", **answer))


def _on_its_way_back(policy: CorePolicy, remediation_mode: Mode = Mode.RECOMMEND) -> CoreFleet:
    fleet = _fleet(policy.with_values(offenders={"repair_score": 99.0}))
    fleet.pass_solo_diagnostics = False
    fleet.raise_finding("n2", xid())
    fleet.clear_finding("n2", xid().key)
    fleet.policy = fleet.state.policy = fleet.policy.with_values(remediation={"mode": remediation_mode})
    return fleet


def test_failed_diagnostics_climb_the_remediation_ladder() -> None:
    fleet = _on_its_way_back(_policy(FindingKind.PROBE_FAILED, coalesce_s=1.0), Mode.ENFORCE)
    _fail_diagnostics(fleet)
    assert fleet.state.nodes["n2"].quarantine.required_action is Action.DRAIN
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    _fail_diagnostics(fleet)
    fleet.advance(0.5, *fleet.state.nodes)
    reboots = [
        e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.kind == "reboot"
    ]
    assert [remediation.node for remediation in reboots] == ["n2"]
    course = fleet.state.nodes["n2"].quarantine.plan
    assert course is not None
    assert "memory" in course.required_diagnostics, "what it has to pass is what it had to pass before"


@pytest.mark.parametrize(("mode", "condemned"), [(Mode.ENFORCE, ["GPU-n2"]), (Mode.RECOMMEND, [])])
def test_wrong_result_condemns_gpus_only_in_enforce_mode(mode: Mode, condemned: list[str]) -> None:
    fleet = _on_its_way_back(_policy(FindingKind.MEMORY_WRONG, mode=mode))
    _fail_diagnostics(fleet, wrong_result=True)
    record = fleet.state.nodes["n2"]
    assert record.state is NodeState.QUARANTINED
    assert (record.quarantine.needs_operator, record.health.defective_gpus) == (bool(condemned), condemned)
