"""Compare budgets, eviction counts and offender scores with a list of evictions, from which rollbacks are removed.

Findings come and go on a few nodes, time passes, and the controller restarts. The model lists every verdict and removes
an eviction or a relapse when the controller rolls it back. Budget, evictions per node and offender scores must match
the list. No node may stay evicted for an outbreak alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.vocabulary import Action, Decision, Finding, NodeState
from everstep_controller.core.effects import AppendToEventLog, PutVerdict
from everstep_controller.core.health.eviction import eviction_scopes
from everstep_controller.core.health.offences import offender_score
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid
from tests.support.plugins.example_counts import examples

NODES = [f"n{number}" for number in range(5)]
ILLS = [xid(79), xid(119, Action.RESET_GPU), xid(120, Action.DRAIN)]
WINDOW_S = 120.0
"""Seconds within which the shipped rules roll an eviction back."""
HALF_LIFE_S = 200.0
POLICY = CorePolicy.lab_preset().with_values(
    budget={"count": 1000, "rack_count": 1000, "job_count": 1000, "window_s": 1e6},
    probes={"required": False},
    readmission={"probation_heartbeats": 2, "quarantine_min_s": 1.0},
    offenders={"wait_s": 0.0, "repair_score": 1e9, "half_life_s": HALF_LIFE_S},
)
node = st.sampled_from(NODES)
ill = st.sampled_from(ILLS)


@dataclass
class _Offence:
    node: str
    at: float
    eviction: bool


class EvictionRollbacks(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fleet = CoreFleet(POLICY)
        self.fleet.register(*NODES)
        self.offences: list[_Offence] = []
        self.seen = 0

    @rule(names=st.lists(node, min_size=1, max_size=4, unique=True), finding=ill, apart_s=st.sampled_from([0.0, 9.0]))
    def fall_ill(self, names: list[str], finding: Finding, apart_s: float = 0.0) -> None:
        for name in names:
            self.fleet.raise_finding(name, finding)
            self.write_down()
            self.wait(apart_s)

    @rule(name=node, finding=ill)
    def get_well(self, name: str, finding: Finding) -> None:
        self.fleet.clear_finding(name, finding.key)
        self.write_down()

    @rule()
    def all_get_well(self) -> None:
        for name in NODES:
            for finding in ILLS:
                self.fleet.clear_finding(name, finding.key)
        self.write_down()

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.fleet.advance(1.0, *NODES)
            self.write_down()

    @rule(name=node, finding=ill)
    def be_ill_alone(self, name: str, finding: Finding) -> None:
        """Give a node an offence that is no outbreak and stays in its record."""
        self.all_get_well()
        self.fall_ill([name], finding)
        self.get_well(name, finding)
        self.wait(WINDOW_S + 1.0)

    @rule()
    def restart(self) -> None:
        self.fleet.restart()
        for name in NODES:
            self.fleet.beat(name, *self.fleet.state.nodes[name].health.agent_findings.values())
        self.write_down()

    def write_down(self) -> None:
        for effect in self.fleet.effects[self.seen :]:
            if isinstance(effect, PutVerdict) and effect.verdict.decision in (Decision.EVICT, Decision.QUARANTINE):
                evicted = effect.verdict.decision is Decision.EVICT
                self.offences.append(_Offence(effect.verdict.node, effect.verdict.at, evicted))
            elif isinstance(effect, AppendToEventLog) and effect.entry.kind == "node.eviction_rolled_back":
                assert effect.entry.node is not None
                its = self.of(effect.entry.node)
                assert effect.entry.at - its[-1].at <= WINDOW_S
                assert ("the eviction of" in effect.entry.sentence) == its[-1].eviction
                self.offences.remove(its[-1])
        self.seen = len(self.fleet.effects)

    def of(self, name: str) -> list[_Offence]:
        return [offence for offence in self.offences if offence.node == name]

    @invariant()
    def budget_counts_evictions_without_rollbacks(self) -> None:
        assert eviction_scopes(self.fleet.state, self.fleet.now)[0].used == sum(
            1 for offence in self.offences if offence.eviction
        )
        for name in NODES:
            assert self.fleet.state.nodes[name].history.eviction_times == [
                offence.at for offence in self.of(name) if offence.eviction
            ]

    @invariant()
    def score_is_the_sum_of_decayed_offences(self) -> None:
        for name in NODES:
            total = sum(2.0 ** ((offence.at - self.fleet.now) / HALF_LIFE_S) for offence in self.of(name))
            score = offender_score(self.fleet.state.nodes[name], self.fleet.now, HALF_LIFE_S)
            assert abs(score - total) < 1e-6

    @invariant()
    def no_node_is_out_for_an_outbreak_alone(self) -> None:
        for finding in ILLS:
            name = f"{finding.kind}/{finding.xid}"
            lately = [
                at
                for at in self.fleet.state.shared_findings.sightings.get(name, {}).values()
                if at >= self.fleet.now - WINDOW_S
            ]
            of_all = self.fleet.state.shared_findings.sightings[name] if 2 * len(lately) > len(NODES) else {}
            for other in (*of_all, *self.fleet.state.shared_findings.outbreaks.get(name, {})):
                offences = [offence.at for offence in self.of(other)]
                if offences and self.fleet.now - offences[-1] < WINDOW_S:
                    record = self.fleet.state.nodes[other]
                    assert record.state is not NodeState.QUARANTINED or record.quarantine.causes != [finding.key]


@pytest.mark.promise("outbreaks")
def test_eviction_rollback_matches_recount_of_evictions() -> None:
    most = settings(max_examples=examples(15), stateful_step_count=15, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(EvictionRollbacks, settings=most)
