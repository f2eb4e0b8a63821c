"""Nodes that are drained by a provider's notice."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, JobState, Mode, NodeState, Severity
from everstep.wire.v1.directives import SpillVersion
from everstep.wire.v1.training import SpillPlan
from everstep_controller.core.effects import Send
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.policy import Rulebook
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences

NOTICE = Finding(
    kind=FindingKind.NODE_NOTICE,
    subject="aws/spot-instance-action",
    severity=Severity.WARNING,
    action=Action.DRAIN,
    message="AWS will terminate this instance at 2023-11-14T22:15:20Z",
    value=1_700_000_120.0,
    rule="notice-reclaim",
)
AHEAD = msgspec.structs.replace(NOTICE, severity=Severity.INFO, action=Action.NONE, mode=Mode.OBSERVE)


def _fleet(nodes: int = 4, **spec: Any) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes, **spec)
    fleet.seal(10)
    return fleet


def test_notice_drains_node_at_boundary_without_blame() -> None:
    fleet = _fleet()
    effects = fleet.raise_finding("n2", NOTICE)
    generation = fleet.job().generation
    assert fleet.seats() == ["n1", "n3", "n4"]
    assert generation is not None
    assert generation.after_step is not None
    assert fleet.node_state("n2") is NodeState.HELD
    assert decisions(effects) == []
    assert fleet.state.fleet.recent_evictions == []
    assert fleet.state.nodes["n2"].history.offence_score == 0.0


def test_notices_of_many_nodes_are_no_outbreak() -> None:
    fleet = _fleet(nodes=6)
    for node in ("n1", "n2", "n3", "n4"):
        fleet.raise_finding(node, NOTICE)
    assert fleet.seats() == ["n5", "n6"]
    assert fleet.job_state() is JobState.RUNNING
    assert [fleet.node_state(f"n{i}") for i in range(1, 5)] == [NodeState.HELD] * 4


def test_job_keeps_noticed_node_that_it_needs() -> None:
    fleet = _fleet(nodes=4, min_nodes=3)
    fleet.raise_finding("n1", NOTICE)
    fleet.raise_finding("n2", NOTICE)
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, ["n2", "n3", "n4"])
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.resume(step=40)
    fleet.register("n9")
    fleet.join("n9")
    fleet.advance(6.0, *fleet.state.nodes)
    assert "n2" not in fleet.seats()
    assert "n9" in fleet.seats()


def test_needed_noticed_node_makes_newest_version_stored() -> None:
    fleet = _fleet(nodes=2, min_nodes=2, spill=SpillPlan(url="file:///store", every_steps=1000000))
    spills = [e for e in fleet.raise_finding("n2", NOTICE) if isinstance(e, Send) and isinstance(e.body, SpillVersion)]
    assert spills
    assert fleet.job_state() is JobState.RUNNING


def test_withdrawn_notice_returns_node() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", NOTICE)
    fleet.clear_finding("n2", NOTICE.key)
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_withdrawn_notice_leaves_an_operators_drain() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", NOTICE)
    fleet.order(OperatorAction.DRAIN, node="n2")
    fleet.clear_finding("n2", NOTICE.key)
    fleet.advance(5.0, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.order(OperatorAction.RELEASE, node="n2")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_operator_readmits_node_in_spite_of_notice() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", NOTICE)
    fleet.order(OperatorAction.READMIT, node="n2")
    fleet.raise_finding("n2", msgspec.structs.replace(NOTICE, message="again"))
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_early_notice_drains_nothing_until_it_is_due() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", AHEAD)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.raise_finding("n2", NOTICE)
    assert fleet.node_state("n2") is NodeState.HELD


def test_site_rule_leaves_notices_to_people() -> None:
    fleet = _fleet()
    rules = fleet.policy.rules
    rule = msgspec.structs.replace(rules.rule_for(NOTICE), mode=Mode.RECOMMEND)
    rulebook = Rulebook({**rules.rules_by_kind, NOTICE.kind: (rule,)})
    fleet.policy = fleet.state.policy = msgspec.structs.replace(fleet.policy, rules=rulebook)
    fleet.raise_finding("n2", NOTICE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    assert "n2" in fleet.seats()


def test_reclaimed_node_is_lost_without_flapping() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", NOTICE)
    fleet.resume(step=40)
    fleet.advance(60.0, "n1", "n3", "n4")
    record = fleet.state.nodes["n2"]
    assert (record.state, record.liveness.loss_times) == (NodeState.LOST, [])
    fleet.register("n2", findings=(NOTICE,))
    assert fleet.node_state("n2") is NodeState.HELD
    fleet.register("n2", boot_id="boot-2")
    assert fleet.node_state("n2") is NodeState.PROBATION


def test_restarts_of_agent_and_controller_drain_once() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", NOTICE)
    fleet.resume(step=40)
    number = fleet.job().progress.last_number
    fleet.restart()
    fleet.register("n2", findings=(NOTICE,))
    fleet.advance(10.0, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.HELD
    assert fleet.job().progress.last_number == number
    assert len(logged_sentences(fleet.effects, "node.notice")) == 1


def test_notice_waits_for_database() -> None:
    fleet = _fleet()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full"))
    fleet.raise_finding("n2", NOTICE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    fleet.advance(3.0, *fleet.state.nodes)
    assert fleet.node_state("n2") is NodeState.HELD
