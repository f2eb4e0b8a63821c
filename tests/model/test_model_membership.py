"""Compare rosters with a plain model: the nodes that offer themselves to each job, and sizes counted by hand.

Nodes join, leave, fall silent, return, are drained and readmitted. Ranks die with and without a replacement. Two jobs
compete for the same nodes, one of them in blocks of two within a rack. The database goes away, and the controller
restarts. Every roster is checked when it is made. After a quiet time both jobs have all nodes that they can have.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from everstep.errors import EverstepError
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.engine import HeartbeatResult
from everstep_controller.core.events import ControllerStarted, DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, generations
from tests.support.plugins.example_counts import examples

NODES = [f"n{number}" for number in range(8)]
RACK = {name: f"r{number % 3}" for number, name in enumerate(NODES)}
BLOCKS, PLAIN = "blocks", "plain"
SHAPES: dict[str, dict[str, Any]] = {
    BLOCKS: {"min_nodes": 2, "max_nodes": 4, "block_nodes": 2, "block_within": "rack", "priority": 5},
    PLAIN: {"min_nodes": 1, "max_nodes": 5, "nproc_per_node": 2},
}
POLICY = CorePolicy.lab_preset().with_values(
    probes={"required": False},
    readmission={"probation_heartbeats": 1},
    regroups={"rank_flap_count": 1000},
    jobs={"growth_interval_s": 0.5, "preempt_after_s": 1.0},
)
node = st.sampled_from(NODES)
job = st.sampled_from([BLOCKS, PLAIN])


class Membership(RuleBasedStateMachine):
    @initialize(first=job, blocks=st.sets(node), plain=st.sets(node))
    def begin(self, first: str, blocks: set[str], plain: set[str]) -> None:
        self.fleet = CoreFleet(POLICY)
        self.epoch = 1
        self.away = False
        self.fleet.feed(ControllerStarted(epoch=self.epoch))
        self.offers: dict[str, dict[str, bool]] = {BLOCKS: {}, PLAIN: {}}
        """For each job the nodes that offer themselves, and whether their launcher can still replace a rank."""
        self.numbers: dict[str, int] = {}
        for name in NODES:
            self.fleet.register(name, domain=Domain(rack=RACK[name]))
        wanted = {BLOCKS: blocks, PLAIN: plain}
        for of in sorted(wanted, key=lambda name: name != first):
            self.join(wanted[of], of)
        self.wait(1.1, set(NODES))
        for of in wanted:
            self.resume(of)

    @rule(names=st.sets(node, min_size=1, max_size=4), to=job)
    def join(self, names: set[str], to: str) -> None:
        for name in sorted(names):
            self.offers[to][name] = True
            self.look(self.fleet.join, name, job=to, join_wait_s=1.0, **SHAPES[to])

    @rule(name=node, of=job)
    def leave(self, name: str, of: str) -> None:
        if self.offers[of].pop(name, None) is not None:
            self.look(self.fleet.leave, name, job=of)

    @rule(name=node)
    def disconnect(self, name: str) -> None:
        self.look(self.fleet.disconnect, name)

    @rule(name=node)
    def hear(self, name: str) -> None:
        self.look(self.fleet.mark_seen, name)

    @rule(name=node, kind=st.sampled_from([OperatorAction.DRAIN, OperatorAction.READMIT]))
    def order(self, name: str, kind: OperatorAction) -> None:
        try:
            self.look(self.fleet.order, kind, node=name)
        except EverstepError:
            return
        if kind is OperatorAction.READMIT:
            for offers in self.offers.values():
                offers.update(dict.fromkeys(offers.keys() & {name}, True))

    @rule(of=job, rank=st.integers(0, 9), replacement=st.booleans())
    def lose_rank(self, of: str, rank: int, replacement: bool) -> None:
        running = self.running(of)
        if running is not None and rank < running.world_size:
            if not replacement:
                self.offers[of][running.roster[rank].node] = False
            self.look(self.fleet.lose_rank, rank, job=of, replacement=replacement)

    @rule(of=job, step=st.integers(1, 50))
    def step(self, of: str, step: int) -> None:
        if self.running(of) is not None:
            self.look(self.fleet.progress, step, job=of)

    @rule(of=job)
    def resume(self, of: str) -> None:
        if self.running(of) is not None:
            self.look(self.fleet.resume, of)

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 3.0]), beating=st.sets(node, min_size=5))
    def wait(self, seconds: float, beating: set[str]) -> None:
        self.beats(sorted(beating))
        self.look(self.fleet.advance, seconds, *sorted(beating))

    def beats(self, nodes: list[str]) -> None:
        """Send a heartbeat of each node, and its findings if the controller asks for them."""
        for name in nodes:
            if self.fleet.touch(name) is HeartbeatResult.UNKNOWN:
                self.look(self.fleet.beat, name)

    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.away = False
        self.fleet.epoch = self.epoch
        self.look(self.fleet.restart)

    @rule(away=st.booleans())
    def store(self, away: bool) -> None:
        self.away = away
        self.look(self.fleet.feed, DatabaseAvailabilityChanged(is_unavailable=away, reason="disk full"))

    @rule()
    def quiet(self) -> None:
        """Let all nodes beat and resume until no roster changes any more."""
        self.store(False)
        for _ in range(12):
            self.beats(NODES)
            self.look(self.fleet.advance, 1.2, *NODES)
            for of in (BLOCKS, PLAIN):
                if self.running(of) is not None:
                    self.look(self.fleet.resume, of, step=10)
        self.check_settled()

    def running(self, of: str) -> GenerationSpec | None:
        record = self.fleet.state.jobs.get(of)
        return self.fleet.running(of) if record is not None and record.status.state is JobState.RUNNING else None

    def look(self, act: object, *args: object, **more: object) -> None:
        """Call ``act``, and check every roster that it opens."""
        before = len(self.fleet.effects)
        act(*args, **more)  # type: ignore[operator]
        for spec in generations(self.fleet.effects[before:]):
            self.check_roster(spec)

    def check_roster(self, spec: GenerationSpec) -> None:
        seats, of = list(spec.seats), spec.job
        assert spec.number > self.numbers.get(of, 0), "numbers of generations rise"
        assert not self.away or spec.number > self.epoch * NUMBERS_PER_EPOCH, "numbers are from this epoch's block"
        self.numbers[of] = spec.number
        assert self.runs(of, seats), f"{of} cannot run on {seats}"
        assert len(seats) <= SHAPES[of]["max_nodes"]
        if of == BLOCKS:
            assert all(RACK[first] == RACK[second] for first, second in zip(seats[::2], seats[1::2], strict=True))

    def runs(self, of: str, nodes: list[str]) -> bool:
        return self.most(of, nodes) >= int(SHAPES[of]["min_nodes"])

    @staticmethod
    def most(of: str, nodes: list[str]) -> int:
        """Return how many of these nodes can compute in whole blocks."""
        if of == PLAIN:
            return min(len(nodes), 5)
        return min(sum(count // 2 * 2 for count in Counter(RACK[name] for name in nodes).values()), 4)

    def free(self, of: str) -> list[str]:
        """Return the healthy nodes that may compute for the job: its own, and those without a job."""
        other = self.running(PLAIN if of == BLOCKS else BLOCKS)
        taken = other.seats if other is not None else ()
        healthy = [name for name in NODES if self.fleet.node_state(name) is NodeState.HEALTHY]
        return [name for name in healthy if self.offers[of].get(name) and name not in taken]

    def check_settled(self) -> None:
        blocks, plain = self.running(BLOCKS), self.running(PLAIN)
        for spec in (blocks, plain):
            if spec is None:
                continue
            for name in spec.seats:
                assert self.offers[spec.job].get(name), f"{name} computes for {spec.job} and does not offer itself"
        assert (len(blocks.seats) if blocks else 0) == self.enough(BLOCKS, self.free(BLOCKS))
        if blocks is None and plain is not None:
            self.check_nothing_to_take(plain)
        left = self.free(PLAIN)
        contested = set(left) - set(plain.seats if plain else ())
        if blocks is None or len(blocks.seats) == 4 or not contested:
            assert (len(plain.seats) if plain else 0) == self.enough(PLAIN, left)

    def enough(self, of: str, nodes: list[str]) -> int:
        most = self.most(of, nodes)
        return most if most >= int(SHAPES[of]["min_nodes"]) else 0

    def check_nothing_to_take(self, plain: GenerationSpec) -> None:
        """Check that the other job has no spare nodes with which the job of higher priority could run."""
        offered = [name for name in plain.seats if self.offers[BLOCKS].get(name)]
        spare = len(plain.seats) - 1 + len([n for n in self.free(PLAIN) if n not in plain.seats])
        choices = chain.from_iterable(combinations(offered, size) for size in range(1, spare + 1))
        assert not any(self.runs(BLOCKS, [*self.free(BLOCKS), *taken]) for taken in choices if len(taken) <= spare)


@pytest.mark.promise("rosters-whole")
@pytest.mark.slow
def test_rosters_match_membership_model() -> None:
    run_state_machine_as_test(
        Membership,
        settings=settings(
            max_examples=examples(20),
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
