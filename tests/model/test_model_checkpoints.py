"""Commits against a dumb model: for each version, what each rank said of it; and what was announced last.

Ranks seal in any order, late, without copies, without keeping; ranks are lost, boundaries announced, controllers
restarted, the database goes away. A version is committed exactly when the model says so, and every generation starts
from what was committed last.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.errors import EverstepError
from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.training import RestoreRule
from everstep_controller.core.effects import Effect, PutVersion
from everstep_controller.core.engine import HeartbeatResult
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, generations, sent
from tests.support.plugins.example_counts import examples

RANKS = 3
NODES = [f"n{number + 1}" for number in range(RANKS + 1)]
POLICY = CorePolicy.lab_preset().with_values(regroups={"rank_flap_count": 1000}, checkpoints={"version_window": 1000})
FIRST = "first"
"""No candidate was announced in this generation yet: its first version is one."""
step = st.integers(1, 30)
lacking = st.tuples(st.integers(0, RANKS - 1), st.sampled_from(["", "", "copies", "room"]))
"""A rank without copies enough, or without room to keep the version; or none."""


class Checkpoints(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fleet = CoreFleet(POLICY)
        self.fleet.start(RANKS, 1)
        self.away = False
        self.committed: Version | None = None
        self.candidate: int | str | None = FIRST
        self.said: dict[int, dict[int, bool]] = {}
        """By step and rank, of the running generation: whether the rank keeps it, with copies enough."""
        self.settled = 0
        self.number = self.fleet.spec().number

    @rule(
        at=step, rank=st.integers(0, RANKS - 1), safe=st.booleans() | st.just(True), kept=st.just(True) | st.booleans()
    )
    def seal(self, at: int, rank: int, safe: bool, kept: bool) -> None:
        running = self.fleet.running()
        if self.fleet.job_state() is not JobState.RUNNING or rank >= running.world_size:
            return
        expected = self.expect(at, rank, safe and kept, running.world_size)
        effects = self.look(self.tell, at, rank, safe, kept)
        found = [effect.doc.version for effect in effects if isinstance(effect, PutVersion)]
        assert found == ([expected] if expected is not None else [])

    @rule(at=step, lacking=lacking)
    def seal_everywhere(self, at: int, lacking: tuple[int, str]) -> None:
        for rank in range(RANKS):
            digest = lacking[1] if rank == lacking[0] else ""
            self.seal(at, rank, digest != "copies", digest != "room")

    @rule(lacking=lacking)
    def seal_candidate(self, lacking: tuple[int, str]) -> None:
        if isinstance(self.candidate, int):
            self.seal_everywhere(self.candidate, lacking)

    @rule(at=step)
    def progress(self, at: int) -> None:
        if self.fleet.job_state() is JobState.RUNNING:
            self.look(self.fleet.progress, at)

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def wait(self, seconds: float) -> None:
        for name in NODES:
            if self.fleet.touch(name) is HeartbeatResult.UNKNOWN:
                self.look(self.fleet.beat, name)
        self.look(self.fleet.advance, seconds, *NODES)

    @rule()
    def resume(self) -> None:
        if self.fleet.job_state() is JobState.RUNNING:
            self.look(self.fleet.resume)

    @rule(rank=st.integers(0, RANKS - 1))
    def lose_rank(self, rank: int) -> None:
        if self.fleet.job_state() is JobState.RUNNING and rank < self.fleet.running().world_size:
            self.look(self.fleet.lose_rank, rank)

    @rule(name=st.sampled_from(NODES), kind=st.sampled_from([OperatorAction.DRAIN, OperatorAction.READMIT]))
    def order(self, name: str, kind: OperatorAction) -> None:
        try:
            self.look(self.fleet.order, kind, node=name)
        except EverstepError:
            return

    @rule()
    def restart(self) -> None:
        self.away = False
        here = self.committed is not None and self.committed.generation == self.number
        self.candidate = None if here or self.fleet.job().progress.resumed_at is not None else FIRST
        self.settled, self.said = self.committed.step if here and self.committed else 0, {}
        self.look(self.fleet.restart)

    @rule(away=st.booleans())
    def store(self, away: bool) -> None:
        self.away = away
        self.look(self.fleet.feed, DatabaseAvailabilityChanged(is_unavailable=away, reason="disk full"))

    def expect(self, at: int, rank: int, good: bool, world: int) -> Version | None:
        """The version that this word is the last one for, and that is to be committed by it."""
        if at <= self.settled:
            return None
        said = self.said.setdefault(at, {})
        said[rank] = said.get(rank, False) or good
        if len(said) < world:
            return None
        self.settled = at
        announced = self.candidate in (FIRST, at)
        if not (all(said.values()) and announced) or self.away or self.fleet.job().outgoing_generation is not None:
            return None
        self.committed = Version(self.number, at)
        return self.committed

    def look(self, act: object, *args: object, **more: object) -> list[Effect]:
        """Run the action, and take the announced versions and the running generation from its effects."""
        before = len(self.fleet.effects)
        act(*args, **more)  # type: ignore[operator]
        effects = self.fleet.effects[before:]
        for spec in generations(effects):
            expected = RestoreRule(floor=self.committed)
            assert spec.restore == expected, f"generation {spec.number} starts from {spec.restore}, not {expected}"
        if self.fleet.job_state() is JobState.RUNNING and self.fleet.running().number != self.number:
            self.number, self.candidate = self.fleet.running().number, FIRST
            self.said, self.settled = {}, 0
        for notice in sent(effects, VersionNotice).values():
            if notice.generation == self.number:
                assert notice.committed == self.committed
                self.candidate = notice.candidate
        return effects

    def tell(self, at: int, rank: int, safe: bool, kept: bool) -> None:
        self.fleet.seal_one(at, rank, durable=safe, commit_candidate=kept, digests={"world": f"d{at}"})

    @invariant()
    def what_was_committed_is_known_across_restarts_and_generations(self) -> None:
        assert self.fleet.state.job_runtime["job"].commits.committed_version == self.committed
        assert self.fleet.job().commits.restore_ceiling is None


@pytest.mark.promise("commit-complete")
def test_commits_match_per_rank_model() -> None:
    run_state_machine_as_test(
        Checkpoints,
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
