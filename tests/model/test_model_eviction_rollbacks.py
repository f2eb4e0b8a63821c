"""What evictions leave behind, against a list of them: an eviction that is taken back was never there.

Nodes fall ill of a few things and get well, time passes, the controller is restarted. The model writes down every
verdict, strikes out an eviction or a relapse when its node is acquitted, and adds up from what is left: the places in
the budget, the evictions of each node, its score of offences. Whoever is of an outbreak is not out for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from everstep_controller.core.effects import Audit, PutVerdict
from everstep_controller.core.health.eviction import eviction_scopes
from everstep_controller.core.health.offences import offender_score
from everstep_controller.core.policy import CorePolicy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.vocabulary import Action, Decision, Finding, NodeState
from tests.support.core_fleet import CoreFleet
from tests.support.examples import examples
from tests.support.findings import xid

NODES = [f"n{number}" for number in range(5)]
ILLS = [xid(79), xid(119, Action.RESET_GPU), xid(120, Action.DRAIN)]
WINDOW_S = 120.0
"""Of the shipped rules: in which an eviction is taken back."""
HALF_LIFE_S = 200.0
POLICY = msgspec.structs.replace(
    CorePolicy.lab_preset(),
    eviction_count=1000,
    eviction_rack_count=1000,
    eviction_job_count=1000,
    eviction_window_s=1e6,
    probe_required=False,
    probation_heartbeats=2,
    quarantine_min_s=1.0,
    offender_wait_s=0.0,
    offender_repair_score=1e9,
    offender_half_life_s=HALF_LIFE_S,
)
node = st.sampled_from(NODES)
ill = st.sampled_from(ILLS)


@dataclass
class _Offence:
    node: str
    at: float
    eviction: bool


class Acquittals(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fleet = CoreFleet(POLICY)
        self.fleet.register(*NODES)
        self.offences: list[_Offence] = []
        self.seen = 0

    # --- what happens ----------------------------------------------------------------------------------------------

    @rule(names=st.lists(node, min_size=1, max_size=4, unique=True), what=ill, apart_s=st.sampled_from([0.0, 9.0]))
    def fall_ill(self, names: list[str], what: Finding, apart_s: float = 0.0) -> None:
        for name in names:
            self.fleet.raise_finding(name, what)
            self.write_down()
            self.wait(apart_s)

    @rule(name=node, what=ill)
    def get_well(self, name: str, what: Finding) -> None:
        self.fleet.clear_finding(name, what.key)
        self.write_down()

    @rule()
    def all_get_well(self) -> None:
        for name in NODES:
            for what in ILLS:
                self.fleet.clear_finding(name, what.key)
        self.write_down()

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.fleet.advance(1.0, *NODES)
            self.write_down()

    @rule(name=node, what=ill)
    def be_ill_alone(self, name: str, what: Finding) -> None:
        """An offence of its own, which stays."""
        self.all_get_well()
        self.fall_ill([name], what)
        self.get_well(name, what)
        self.wait(WINDOW_S + 1.0)

    @rule()
    def restart(self) -> None:
        self.fleet.restart()
        for name in NODES:
            self.fleet.beat(name, *self.fleet.state.nodes[name].health.agent_findings.values())
        self.write_down()

    # --- the list --------------------------------------------------------------------------------------------------

    def write_down(self) -> None:
        for effect in self.fleet.effects[self.seen :]:
            if isinstance(effect, PutVerdict) and effect.verdict.decision in (Decision.EVICT, Decision.QUARANTINE):
                evicted = effect.verdict.decision is Decision.EVICT
                self.offences.append(_Offence(effect.verdict.node, effect.verdict.at, evicted))
            elif isinstance(effect, Audit) and effect.entry.kind == "node.eviction_rolled_back":
                its = self.of(effect.entry.node)
                assert effect.entry.at - its[-1].at <= WINDOW_S
                assert ("the eviction of" in effect.entry.sentence) == its[-1].eviction
                self.offences.remove(its[-1])
        self.seen = len(self.fleet.effects)

    def of(self, name: str) -> list[_Offence]:
        return [one for one in self.offences if one.node == name]

    # --- what holds always -------------------------------------------------------------------------------------------

    @invariant()
    def what_counts_are_the_evictions_that_were_not_taken_back(self) -> None:
        assert eviction_scopes(self.fleet.state, self.fleet.now)[0].used == sum(
            1 for one in self.offences if one.eviction
        )
        for name in NODES:
            assert self.fleet.state.nodes[name].history.eviction_times == [
                one.at for one in self.of(name) if one.eviction
            ]

    @invariant()
    def a_score_is_the_sum_of_offences_each_halved_with_time(self) -> None:
        for name in NODES:
            total = sum(2.0 ** ((one.at - self.fleet.now) / HALF_LIFE_S) for one in self.of(name))
            told = offender_score(self.fleet.state.nodes[name], self.fleet.now, HALF_LIFE_S)
            assert abs(told - total) < 1e-6

    @invariant()
    def nobody_is_out_for_an_outbreak_alone(self) -> None:
        for what in ILLS:
            name = f"{what.kind}/{what.xid}"
            lately = [at for at in self.fleet.state.sightings.get(name, {}).values() if at >= self.fleet.now - WINDOW_S]
            of_all = self.fleet.state.sightings[name] if 2 * len(lately) > len(NODES) else {}
            for other in (*of_all, *self.fleet.state.outbreaks.get(name, {})):
                offences = [one.at for one in self.of(other)]
                if offences and self.fleet.now - offences[-1] < WINDOW_S:
                    record = self.fleet.state.nodes[other]
                    assert record.state is not NodeState.QUARANTINED or record.quarantine.causes != [what.key]


@pytest.mark.promise("outbreaks")
def test_eviction_rollback_matches_recount_of_evictions() -> None:
    most = settings(max_examples=examples(15), stateful_step_count=15, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(Acquittals, settings=most)
