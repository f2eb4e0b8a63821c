"""Verdicts on findings across time and nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, NodeState, Severity
from everstep_controller.core.effects import AppendToEventLog, PutVerdict
from everstep_controller.core.health.eviction import Deferral
from everstep_controller.core.judgement.verdicts import FindingReport, Judgement, Response, judge
from everstep_controller.core.policy import CorePolicy, CountingScope, Rulebook, VerdictRule
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet.core_fleet import CoreFleet, decisions, logged_sentences
from tests.support.fleet.findings import port_down, xid

SIX = [f"n{i}" for i in range(1, 7)]


def _changed(kind: FindingKind, **keys: Any) -> CorePolicy:
    """The lab's policy with other keys in the kind's nameless rule."""
    policy = with_rules(CorePolicy.lab_preset())
    kinds = dict(policy.rules.rules_by_kind)
    kinds[kind] = (*kinds[kind][:-1], msgspec.structs.replace(kinds[kind][-1], **keys))
    return msgspec.structs.replace(policy, rules=Rulebook(kinds))


def _fleet(policy: CorePolicy | None = None, nodes: int = 6, **more: Any) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.start(nodes, **more)
    fleet.seal(10)
    return fleet


def _sentences(fleet: CoreFleet, node: str) -> list[str]:
    return [e.verdict.sentence for e in fleet.effects if isinstance(e, PutVerdict) and e.verdict.node == node]


def test_verdict_names_rule_count_step_and_clear_condition() -> None:
    fleet = _fleet(_changed(FindingKind.GPU_NVLINK, boot_grace_s=0.0))
    nvlink = Finding(
        kind=FindingKind.GPU_NVLINK,
        subject="0",
        severity=Severity.CRITICAL,
        action=Action.RESET_GPU,
        message="2 NVLinks of GPU 0 are down",
    )
    fleet.raise_finding("n2", nvlink)
    assert _sentences(fleet, "n2") == [
        "n2: 2 NVLinks of GPU 0 are down (rule gpu.nvlink: occurrence 1 of 1; next action (1 of 3): reset gpu; "
        "the node may return once the finding has been clear for 30 s); evicted"
    ]
    assert fleet.state.nodes["n2"].quarantine.required_action is Action.RESET_GPU


# --- the judgement -----------------------------------------------------------------------------------------------


def _records(fleet: CoreFleet) -> bytes:
    state = fleet.state
    return msgspec.json.encode(
        (
            state.fleet,
            state.nodes,
            state.jobs,
            state.shared_findings.sightings,
            state.shared_findings.outbreaks,
            state.deadline_queue.heap,
        )
    )


def _judge(fleet: CoreFleet, finding: Finding, node: str = "n2") -> Judgement:
    """Judge a finding that stands, and check that this changes nothing."""
    fleet.state.nodes[node].health.agent_findings[finding.key] = finding
    before = _records(fleet)
    judged = judge(fleet.state, FindingReport(node=node, finding=finding), fleet.now, "")
    assert _records(fleet) == before
    return judged


def test_judgement_evicts_and_changes_nothing() -> None:
    judged = _judge(_fleet(), xid())
    assert (judged.response, judged.action, judged.deferred_by) == (Response.EVICT, Action.REPAIR, None)


def test_judgement_names_deferral_and_changes_nothing() -> None:
    fleet = _fleet(nodes=2, min_nodes=2)
    judged = _judge(fleet, xid())
    assert judged.response is Response.EVICT
    assert isinstance(judged.deferred_by, Deferral)
    assert "job job needs 2 nodes and 1 would be left" in judged.deferred_by.reason
    assert not fleet.state.evictions.deferred


def test_judgement_of_exceeded_budget_trips_no_breaker() -> None:
    policy = CorePolicy.lab_preset()
    budget = msgspec.structs.replace(policy.budget, count=1)
    fleet = _fleet(with_rules(msgspec.structs.replace(policy, budget=budget)), nodes=6)
    fleet.raise_finding("n1", xid(79))
    assert fleet.state.nodes["n1"].state is NodeState.QUARANTINED
    judged = _judge(fleet, xid(62))
    assert isinstance(judged.deferred_by, Deferral)
    assert judged.deferred_by.trips_breaker
    assert not fleet.state.fleet.breaker_reason


def test_judgement_spares_node_in_outbreak() -> None:
    fleet = _fleet()
    judged = judge(fleet.state, FindingReport(node="n2", finding=xid()), fleet.now, "xid is everywhere")
    assert (judged.response, judged.spared_by) == (Response.SPARE, "xid is everywhere")


# --- N of M ------------------------------------------------------------------------------------------------------


def _counting(**more: Any) -> CorePolicy:
    keys = {"n_of_m": (3, 6), "window_s": 100.0, "boot_grace_s": 0.0}
    return _changed(FindingKind.NETWORK_PORT_DOWN, **(keys | more))


def _flap(fleet: CoreFleet, node: str, finding: Finding) -> list[tuple[str, str]]:
    decided = decisions(fleet.raise_finding(node, finding))
    fleet.clear_finding(node, finding.key)
    return decided


def test_reports_outside_the_window_do_not_count() -> None:
    fleet = _fleet(_counting())
    for _ in range(4):
        _flap(fleet, "n2", port_down())
        fleet.advance(60.0, *SIX)
    assert fleet.node_state("n2") is NodeState.HEALTHY


def test_subjects_are_counted_separately_unless_scope_is_node() -> None:
    ports = [port_down(f"mlx5_{i}") for i in range(3)]
    apart = _fleet(_counting())
    together = _fleet(_counting(scope=CountingScope.NODE))
    for fleet in (apart, together):
        for port in ports:
            _flap(fleet, "n2", port)
    assert apart.node_state("n2") is NodeState.HEALTHY
    assert together.node_state("n2") is NodeState.QUARANTINED


def test_application_xid_counts_against_gpu_on_second_report() -> None:
    fleet = _fleet()
    once = msgspec.structs.replace(
        xid(13, Action.RESTART_RANK), severity=Severity.WARNING, mode=Mode.OBSERVE, value=1.0
    )
    assert decisions(fleet.beat("n2", once)) == []
    assert decisions(fleet.beat("n3", once)) == []
    twice = msgspec.structs.replace(once, value=2.0)
    assert decisions(fleet.beat("n2", twice)) == [("n2", "recommend")]
    assert "occurrence 2 of 2 within 86400 s" in _sentences(fleet, "n2")[-1]


def test_findings_limit_retains_critical_findings_and_causes() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", xid(79))
    for number in range(1000, 1400):
        mild = msgspec.structs.replace(xid(number, Action.NONE), severity=Severity.WARNING)
        fleet.raise_finding("n2", mild)
    for number in range(2000, 2100):
        fleet.raise_finding("n2", xid(number))
    kept = fleet.state.nodes["n2"].health.agent_findings
    assert len(kept) == 256
    assert xid(79).key in kept
    assert sum(finding.severity is Severity.CRITICAL for finding in kept.values()) == 101


def test_reports_and_notes_of_a_node_are_bounded() -> None:
    fleet = _fleet(_counting())
    for number in range(200):
        fleet.raise_finding("n2", port_down(f"port-{number}"))
    assert len(fleet.state.nodes["n2"].history.counted_reports) <= 64
    assert len(fleet.state.nodes["n2"].history.entries) <= 48


@pytest.mark.promise("boot-grace")
def test_flapping_finding_is_logged_rarely_and_delays_no_verdict() -> None:
    fleet = _fleet()
    cap = Finding(
        kind=FindingKind.GPU_THROTTLED,
        subject="0",
        severity=Severity.WARNING,
        action=Action.DRAIN,
        message="power cap",
        mode=Mode.RECOMMEND,
    )
    for _ in range(600):
        fleet.raise_finding("n2", cap)
        fleet.clear_finding("n2", cap.key)
        fleet.now += 0.1
    lines = [e for e in fleet.effects if isinstance(e, AppendToEventLog) and e.entry.kind.startswith("finding")]
    assert len(lines) < 40
    assert decisions(fleet.effects).count(("n2", "recommend")) == 1
    assert decisions(fleet.raise_finding("n2", xid())) == [("n2", "evict")]


def test_critical_finding_burst_is_judged_and_summarized() -> None:
    fleet = _fleet(_changed(FindingKind.GPU_XID, mode=Mode.RECOMMEND))
    for number in range(200):
        fleet.raise_finding("n2", msgspec.structs.replace(xid(), subject=f"GPU-{number}"))
    assert len(_sentences(fleet, "n2")) < 16
    assert logged_sentences(fleet.effects, "finding")[-1].endswith("number 128 of a burst of gpu.xid")
    fleet.advance(6.0, *SIX)
    fleet.raise_finding("n2", msgspec.structs.replace(xid(), subject="GPU-new"))
    assert "burst" not in logged_sentences(fleet.effects, "finding")[-1]


@pytest.mark.promise("boot-grace")
def test_port_down_during_boot_grace_is_judged_afterwards() -> None:
    fleet = _fleet()
    for node in SIX:
        assert decisions(fleet.raise_finding(node, port_down())) == []
    for node in SIX[1:]:
        fleet.clear_finding(node, port_down().key)
    fleet.advance(299.0, *SIX)
    assert fleet.node_state("n1") is NodeState.HEALTHY
    decided = decisions(fleet.advance(2.0, *SIX))
    assert decided == [("n1", "evict")]


@pytest.mark.promise("boot-grace")
@pytest.mark.parametrize("first", [True, False])
def test_port_down_after_reboot_keeps_node_quarantined(first: bool) -> None:
    fleet = _fleet()
    fleet.advance(301.0, *SIX)
    fleet.raise_finding("n2", xid())
    fleet.register("n2", boot_id="boot-2", findings=(xid(), port_down()))
    if first:  # what cleared in the grace had it out, and it is on probation when that ends
        fleet.clear_finding("n2", xid().key)
    fleet.advance(310.0, *SIX)
    if not first:
        assert fleet.state.nodes["n2"].quarantine.causes == [xid().key, port_down().key]
        fleet.clear_finding("n2", xid().key)
    fleet.advance(100.0, *SIX)
    assert fleet.node_state("n2") is NodeState.QUARANTINED
    fleet.clear_finding("n2", port_down().key)
    fleet.advance(100.0, *SIX)
    assert fleet.node_state("n2") is not NodeState.QUARANTINED


def test_agent_restart_grants_no_boot_grace() -> None:
    fleet = _fleet()
    fleet.advance(301.0, *SIX)
    fleet.register("n2")
    assert decisions(fleet.raise_finding("n2", port_down())) == [("n2", "evict")]


def test_new_node_with_port_down_in_boot_grace_is_accepted() -> None:
    fleet = CoreFleet()
    fleet.register("n1", findings=(port_down(),))
    assert fleet.node_state("n1") is NodeState.HEALTHY


@pytest.mark.promise("outbreaks")
def test_shared_xid_is_judged_correlated_and_reported_once() -> None:
    fleet = _fleet(nodes=12)
    decided = [decisions(fleet.raise_finding(f"n{i}", xid())) for i in range(1, 9)]
    assert decided[:2] == [[("n1", "evict")], [("n2", "evict")]]
    assert decided[2] == [("n1", "correlated"), ("n2", "correlated"), ("n3", "correlated")]
    assert decided[3:] == [[(f"n{i}", "correlated")] for i in range(4, 9)]
    assert len(logged_sentences(fleet.effects, "fleet.correlated_finding")) == 1
    assert fleet.node_state("n1") is fleet.node_state("n2") is NodeState.PROBATION


@pytest.mark.promise("outbreaks")
def test_finding_standing_after_outbreak_evicts_node() -> None:
    fleet = _fleet(nodes=12)
    names = [f"n{i}" for i in range(1, 13)]
    for node in names[:6]:
        fleet.raise_finding(node, xid())
        fleet.advance(1.0, *names)
    fleet.advance(60.0, *names)
    for node in names[:5]:
        fleet.clear_finding(node, xid().key)
    decided = decisions(fleet.advance(130.0, *names))
    assert ("n6", "evict") in decided
    assert not {(node, "evict") for node in names[:5]} & set(decided)


def test_outbreak_evicts_no_node_while_standing() -> None:
    fleet = _fleet(nodes=12)
    names = [f"n{i}" for i in range(1, 13)]
    for node in names[:8]:
        fleet.raise_finding(node, xid())
    assert ("n5", "evict") not in decisions(fleet.advance(400.0, *names))
    assert len(logged_sentences(fleet.effects, "fleet.correlated_finding")) == 1


@pytest.mark.parametrize(
    ("rule", "finding", "decision"),
    [
        (Mode.ENFORCE, Mode.ENFORCE, "evict"),
        (Mode.RECOMMEND, Mode.ENFORCE, "recommend"),
        (Mode.ENFORCE, Mode.RECOMMEND, "recommend"),
        (Mode.OBSERVE, Mode.ENFORCE, None),
        (Mode.ENFORCE, Mode.OBSERVE, None),
    ],
)
def test_weaker_mode_of_rule_and_finding_applies(rule: Mode, finding: Mode, decision: str | None) -> None:
    fleet = _fleet(_changed(FindingKind.GPU_XID, mode=rule))
    decided = decisions(fleet.raise_finding("n2", msgspec.structs.replace(xid(), mode=finding)))
    assert decided == ([("n2", decision)] if decision else [])


def test_recommend_mode_advances_the_ladder_on_repeats() -> None:
    fleet = _fleet(_changed(FindingKind.GPU_XID, mode=Mode.RECOMMEND))
    once = xid(43, Action.RESTART_RANK)
    for _ in range(3):
        fleet.raise_finding("n2", once)
        fleet.clear_finding("n2", once.key)
        fleet.advance(61.0, *SIX)
    assert "recommended for n2: restart rank" in _sentences(fleet, "n2")[0]
    assert (
        "recommended for n2: reset gpu (rule gpu.xid: occurrence 1 of 1; next action (2 of 4)"
        in _sentences(fleet, "n2")[1]
    )
    assert "recommended for n2: reboot node" in _sentences(fleet, "n2")[2]


def test_crash_reported_by_all_gpus_takes_one_ladder_step() -> None:
    fleet = _fleet()
    for number in range(8):
        fleet.raise_finding("n2", msgspec.structs.replace(xid(43, Action.RESTART_RANK), subject=f"GPU-{number}"))
    assert decisions(fleet.effects) == [("n2", "restart")]


def test_every_shipped_rule_can_be_judged() -> None:
    for kind in FindingKind:
        fleet = _fleet(nodes=4)
        fleet.advance(400.0, "n1", "n2", "n3", "n4")
        finding = Finding(
            kind=kind, subject="x", severity=Severity.CRITICAL, action=Action.REPAIR, message=f"{kind} of x"
        )
        fleet.raise_finding("n2", finding)
        rule: VerdictRule = fleet.policy.rules.rule_for(finding)
        evicted = fleet.node_state("n2") is NodeState.QUARANTINED
        convicts = (
            rule.mode is Mode.ENFORCE
            and not rule.already_handled
            and rule.n_of_m[0] == 1
            and rule.blame_isolation != "pair"
        )
        assert evicted == convicts, kind


def test_invented_findings_use_bounded_memory() -> None:
    fleet = _fleet(CorePolicy.lab_preset().with_values(budget={"count": 1}))
    for number in range(1000, 1700):
        fleet.raise_finding("n2", xid(number))
        fleet.raise_finding("n3", xid(number))
    assert len(fleet.state.shared_findings.sightings) <= 512
    assert len(fleet.state.node_runtime["n2"].finding_bursts) == 1
