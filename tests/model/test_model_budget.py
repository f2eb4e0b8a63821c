"""The eviction budget against a dumb model: a list of every eviction there was, counted anew for each question.

Nodes fall ill and get well, racks and jobs fill up, windows pass, operators reset and readmit, the database goes away
and the controller is restarted, in any order. After each step the model says who may be out and who must be held.
"""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.effects import PutVerdict
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.health.eviction import budget_left, eviction_scopes
from everstep_controller.core.jobs.membership import spares
from everstep_controller.core.policy import CorePolicy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from everstep.vocabulary import Decision, Finding, NodeState
from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet
from tests.support.examples import examples
from tests.support.findings import xid

NODES = [f"n{number}" for number in range(10)]
WINDOW_S = 40.0
POLICY = msgspec.structs.replace(
    CorePolicy.lab_preset(),
    eviction_count=4,
    eviction_share=1.0,
    eviction_rack_count=3,
    eviction_rack_share=0.5,
    eviction_job_count=2,
    eviction_job_share=0.75,
    eviction_window_s=WINDOW_S,
    probe_required=False,
    probation_heartbeats=1,
    quarantine_min_s=1.0,
    offender_repair_score=1e9,
    offender_wait_s=0.0,
)
node = st.sampled_from(NODES)


def _rack(name: str) -> str:
    return f"r{int(name[1:]) % 3}" if int(name[1:]) < 9 else ""


def _ill(name: str) -> Finding:
    """Each node's own sickness, so that none is taken for the sickness of many."""
    return xid(500 + int(name[1:]))


class Budget(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fleet = CoreFleet(POLICY)
        self.out: list[tuple[float, str, str]] = []  # when, of which rack, of which job
        self.vouched: set[str] = set()  # readmitted by an operator while their findings stood
        self.seen = 0
        self.latched = self.away = False
        for name in NODES:
            self.fleet.register(name, domain=Domain(rack=_rack(name)))
            self.fleet.beat(name)
        self.fleet.join(*NODES[:4], job="a", min_nodes=1, max_nodes=4)
        self.fleet.join(*NODES[4:6], job="b", min_nodes=2, max_nodes=2)

    # --- what happens --------------------------------------------------------------------------------------------

    @rule(name=node)
    def falls_ill(self, name: str) -> None:
        before = self._serves(name) and _ill(name).key not in self.fleet.state.nodes[name].health.agent_findings
        expected = self._expected(name) if before else None
        seats, held = (
            self._jobs_of(name),
            {node for node, record in self.fleet.state.nodes.items() if record.health.eviction_deferred_by},
        )
        self.fleet.raise_finding(name, _ill(name))
        told = self._take_verdicts()
        if before:
            assert [one for one in told if one[0] == name] == [(name, expected)]
            if expected is Decision.EVICT:
                self._count(name, seats)
            told = [one for one in told if one[0] != name]
        self._hold_again(told, held)

    def _hold_again(self, told: list[tuple[str, Decision]], held: set[str]) -> None:
        """Beside a node that has just fallen ill only those that were held are told of, once: they may be held by
        something else now, by the fleet's budget too."""
        nodes = [other for other, _ in told]
        assert len(nodes) == len(set(nodes))
        assert set(nodes) <= held
        assert {decision for _, decision in told} <= {Decision.DEFER_EVICTION}
        self.latched = self.latched or any(self._full(other) == "fleet" for other, _ in told)

    @rule(name=node)
    def gets_well(self, name: str) -> None:
        self.fleet.clear_finding(name, _ill(name).key)
        self.vouched.discard(name)
        self._take_verdicts()

    @rule(seconds=st.sampled_from([0.5, 3.0, 15.0, WINDOW_S + 0.5]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            seats = {name: self._jobs_of(name) for name in NODES}
            self.fleet.advance(0.5, *NODES)
            self._count_all(seats)

    @rule(name=node)
    def is_readmitted(self, name: str) -> None:
        if self.fleet.node_state(name) is NodeState.QUARANTINED and not self.away:
            seats = {other: self._jobs_of(other) for other in NODES}
            self.fleet.order(OperatorAction.READMIT, node=name)
            self.vouched.add(name)
            self._count_all(seats)

    @precondition(lambda self: self.latched and not self.away)
    @rule()
    def breaker_is_reset(self) -> None:
        seats = {name: self._jobs_of(name) for name in NODES}
        self.out, self.latched = [], False
        self.fleet.order(OperatorAction.RESET_BREAKER)
        self._count_all(seats)

    @rule()
    def database_changes(self) -> None:
        seats = {name: self._jobs_of(name) for name in NODES}
        self.away = not self.away
        self.fleet.feed(DatabaseAvailabilityChanged(is_unavailable=self.away, reason="gone"))
        self._count_all(seats)

    @rule()
    def controller_restarts(self) -> None:
        if not self.away:
            self.fleet.restart()
            for name in NODES:
                self.fleet.beat(
                    name,
                    *([_ill(name)] if _ill(name).key in self.fleet.state.nodes[name].health.agent_findings else []),
                )
            self._take_verdicts()

    # --- the model -----------------------------------------------------------------------------------------------

    def _recent(self) -> list[tuple[float, str, str]]:
        return [eviction for eviction in self.out if eviction[0] > self.fleet.now - WINDOW_S]

    def _full(self, name: str) -> str:
        """The budget that holds the node, by counting everything anew."""
        recent, rack = self._recent(), _rack(name)
        of_rack = sum(1 for _, other, _ in recent if other == rack)
        if rack and of_rack >= max(1, min(3, 3 // 2)):
            return f"rack:{rack}"
        for job in self._jobs_of(name):
            lost = sum(1 for _, _, other in recent if other == job)
            of_job = len(self.fleet.seats(job)) + lost
            if lost >= max(1, min(2, int(0.75 * of_job))):
                return f"job:{job}"
        if self._needed(name):
            return "needed"
        return "fleet" if len(recent) >= 4 else ""

    def _expected(self, name: str) -> Decision:
        if self.latched or self.away:
            return Decision.DEFER_EVICTION
        full = self._full(name)
        self.latched = full == "fleet"
        return Decision.DEFER_EVICTION if full else Decision.EVICT

    def _needed(self, name: str) -> bool:
        """A node that has come back and has no seat yet could take the place."""
        jobs = [self.fleet.job(job) for job in self._jobs_of(name)]
        return any(
            len(self.fleet.seats(job.job)) - 1 + len(spares(self.fleet.state, job)) < job.spec.min_nodes for job in jobs
        )

    def _jobs_of(self, name: str) -> list[str]:
        jobs = [
            job
            for job in self.fleet.state.jobs.values()
            if job.generation is not None and job.status.state == "running"
        ]
        return [job.job for job in jobs if job.generation is not None and name in job.generation.seated_nodes]

    def _serves(self, name: str) -> bool:
        return self.fleet.node_state(name) in (NodeState.HEALTHY, NodeState.SUSPECT)

    def _count(self, name: str, jobs: list[str]) -> None:
        self.out.append((self.fleet.now, _rack(name), jobs[0] if jobs else ""))

    def _count_all(self, seats: dict[str, list[str]]) -> None:
        """Evictions of held nodes: each must have fitted, and is counted as it was seated before."""
        for name, decision in self._take_verdicts():
            if decision is Decision.EVICT:
                self._count(name, seats[name])
        self.latched = bool(self.fleet.state.fleet.breaker_reason)

    def _take_verdicts(self) -> list[tuple[str, Decision]]:
        verdicts = [effect.verdict for effect in self.fleet.effects[self.seen :] if isinstance(effect, PutVerdict)]
        self.seen = len(self.fleet.effects)
        wanted = (Decision.EVICT, Decision.DEFER_EVICTION)
        return [(verdict.node, verdict.decision) for verdict in verdicts if verdict.decision in wanted]

    # --- what holds always ---------------------------------------------------------------------------------------

    @invariant()
    def no_budget_is_ever_exceeded(self) -> None:
        recent = self._recent()
        assert len(recent) <= 4
        for rack in ("r0", "r1", "r2"):
            assert sum(1 for _, other, _ in recent if other == rack) <= 1
        for job in ("a", "b"):
            assert sum(1 for _, _, other in recent if other == job) <= 2

    @invariant()
    def what_is_told_is_what_was_counted(self) -> None:
        told = eviction_scopes(self.fleet.state, self.fleet.now)
        recent = self._recent()
        used = {scope.id: scope.used for scope in told}
        assert used.pop("fleet") == len(recent)
        racks = {f"rack:{rack}" for _, rack, _ in recent if rack}
        jobs = {f"job:{job}" for _, _, job in recent if job}
        assert used.keys() == racks | jobs
        assert all(
            used[f"rack:{rack}"] == sum(1 for _, other, _ in recent if other == rack) for _, rack, _ in recent if rack
        )
        assert bool(self.fleet.state.fleet.breaker_reason) == self.latched
        assert budget_left(self.fleet.state, self.fleet.now) == (0 if self.latched else 4 - len(recent))

    @invariant()
    def a_sick_node_serves_only_while_something_holds_its_eviction(self) -> None:
        for name in NODES:
            record = self.fleet.state.nodes[name]
            if self._serves(name) and _ill(name).key in record.health.agent_findings and name not in self.vouched:
                assert record.health.deferred_eviction_key == _ill(name).key
                assert name in self.fleet.state.deferred_evictions[record.health.eviction_deferred_by]

    def teardown(self) -> None:
        """Nothing is held for ever: with the breaker reset, the database back and windows passed, all sick nodes go."""
        if self.away:
            self.database_changes()
        for _ in NODES:
            if self.latched:
                self.breaker_is_reset()
            self.time_passes(WINDOW_S + 0.5)
        for name in NODES:
            held_by = self.fleet.state.nodes[name].health.eviction_deferred_by
            assert held_by == "" or held_by.startswith("needed:"), f"{name} is still held by {held_by}"


@pytest.mark.promise("eviction-budget")
@pytest.mark.slow
def test_eviction_budget_matches_recount() -> None:
    most = settings(max_examples=examples(12), stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(Budget, settings=most)
