"""Test whole worlds from their seeds, and the tools that find the cause of a failure."""

from __future__ import annotations

import functools
import hashlib
import logging

import pytest

from tests.sim.campaign import outcomes, reduce_failure
from tests.sim.faults.plan import make_plan
from tests.sim.minimize import smallest_plan
from tests.sim.run import Outcome, play
from tests.support.processes.fork_pool import ForkPool

WORLDS = (4, 17, 18, 22, 30, 33)
"""Seeds of worlds that log all kinds below; ``make test-nightly`` plays 2,000 worlds."""
EXPECTED_KINDS = {
    "controller.resigned",
    "fleet.breaker_tripped",
    "fleet.correlated_finding",
    "fleet.correlated_finding_ended",
    "fleet.correlated_silence",
    "job.failed",
    "job.paused",
    "job.records_behind",
    "launcher.left",
    "node.eviction_rolled_back",
    "node.lost",
    "node.maintenance_ended",
    "node.scheduler_changed",
    "node.suspicion_cleared",
    "parity.given_up",
    "parity.kept",
    "rank.hung",
    "rank.lost",
    "remediation.requested",
    "remediation.confirmed",
    "remediation.failed",
    "remediation.blocked",
    "resumed",
    "blame_isolation.started",
    "blame_isolation.inconclusive",
    "spill.given_up",
    "spill.stored",
    "database.unavailable",
    "database.available",
    "verdict.correlated",
    "verdict.evict",
    "verdict.defer_eviction",
    "verdict.quarantine",
    "verdict.readmit",
    "verdict.recommend",
    "verdict.repair",
    "verdict.restart",
}


@pytest.fixture(scope="module")
def played() -> list[Outcome]:
    return list(outcomes(WORLDS, jobs=2))


@pytest.mark.promise("simulation")
@pytest.mark.slow
@pytest.mark.timeout(600)  # the worlds take seconds of two idle cores, and minutes of busy ones
def test_default_worlds_keep_every_guarantee(played: list[Outcome]) -> None:
    broken = sorted((outcome for outcome in played if outcome.checker), key=lambda outcome: outcome.seed)
    assert not broken, "\n\n".join(str(reduce_failure(outcome.seed, outcome.checker)) for outcome in broken[:3])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_default_worlds_cover_the_expected_events(played: list[Outcome]) -> None:
    kinds = frozenset().union(*(outcome.logged_kinds for outcome in played))
    assert kinds >= EXPECTED_KINDS, sorted(EXPECTED_KINDS - kinds)


@functools.cache
def trace() -> tuple[tuple[float, str, str], ...]:
    """Return the trace of one world."""
    logging.disable(logging.CRITICAL)  # in a forked process too
    lines: list[tuple[float, str, str]] = []
    play(make_plan(2), lambda *line: lines.append(line))
    return tuple(lines)


def trace_digest() -> str:
    return hashlib.sha256(repr(trace()).encode()).hexdigest()


def test_world_replays_identically_from_its_seed(forks: ForkPool) -> None:
    """Replay a world in another interpreter with other string hashes."""
    assert forks.start(trace_digest).result() == trace_digest()


def test_plan_keeps_only_the_selected_faults() -> None:
    plan = make_plan(3)
    selected = [plan.faults[1][0], plan.faults[2][0]]
    assert [number for number, _ in plan.only(selected).faults] == selected
    assert plan.only(selected).machines == plan.machines


@pytest.mark.parametrize("needed", [{0}, {1, 4}, set()])
def test_smallest_plan_keeps_only_the_needed_faults(needed: set[int]) -> None:
    plan = make_plan(1)
    assert len(plan.faults) > 4

    def fails(candidate: object) -> bool:
        return needed <= {number for number, _ in candidate.faults}  # type: ignore[attr-defined]

    assert {number for number, _ in smallest_plan(plan, fails).faults} == needed


def test_world_without_faults_keeps_every_guarantee() -> None:
    outcome = play(make_plan(5).only([]))
    assert outcome.sentence == ""
    assert "resumed" in outcome.logged_kinds


def test_trace_lists_faults_and_decisions() -> None:
    assert any(source == "fault" for _, source, _ in trace())
    assert any("generation: " in f"{source}: {message}" for _, source, message in trace())
