"""Whole worlds from their seeds, and the tools that find out why one of them fails."""

from __future__ import annotations

import functools
import hashlib
import logging

import pytest

from tests.sim.campaign import outcomes, shorten
from tests.sim.minimize import shortest
from tests.sim.plan import make
from tests.sim.run import Outcome, play
from tests.support.forked import ForkPool

WORLDS = (0, 4, 9, 12, 28, 30, 33, 45)
"""Worlds of every suite, until each event below is seen; ``make test-nightly`` plays 2,000."""
SEEN_IN_DEFAULT_WORLDS = {
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
@pytest.mark.timeout(600)  # the worlds take a second of two cores, or of what others leave of them
def test_default_worlds_keep_every_guarantee(played: list[Outcome]) -> None:
    broken = sorted((outcome for outcome in played if outcome.checker), key=lambda outcome: outcome.seed)
    assert not broken, "\n\n".join(str(shorten(outcome.seed, outcome.checker)) for outcome in broken[:3])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_default_worlds_cover_the_expected_events(played: list[Outcome]) -> None:
    seen = frozenset().union(*(outcome.seen for outcome in played))
    assert seen >= SEEN_IN_DEFAULT_WORLDS, sorted(SEEN_IN_DEFAULT_WORLDS - seen)


@functools.cache
def trace() -> tuple[tuple[float, str, str], ...]:
    """Return everything that one world prints."""
    logging.disable(logging.CRITICAL)  # in a forked process too
    lines: list[tuple[float, str, str]] = []
    play(make(2), lambda *words: lines.append(words))
    return tuple(lines)


def trace_digest() -> str:
    return hashlib.sha256(repr(trace()).encode()).hexdigest()


def test_world_replays_identically_from_its_seed(forks: ForkPool) -> None:
    """In a process of another interpreter, whose hashes of strings are others."""
    assert forks.start(trace_digest).result() == trace_digest()


def test_plan_keeps_only_the_selected_faults() -> None:
    plan = make(3)
    kept = [plan.faults[1][0], plan.faults[2][0]]
    assert [place for place, _ in plan.only(kept).faults] == kept
    assert plan.only(kept).machines == plan.machines


@pytest.mark.parametrize("needed", [{0}, {1, 4}, set()])
def test_shrinking_keeps_only_the_needed_faults(needed: set[int]) -> None:
    plan = make(1)
    assert len(plan.faults) > 4

    def fails(candidate: object) -> bool:
        return needed <= {place for place, _ in candidate.faults}  # type: ignore[attr-defined]

    assert {place for place, _ in shortest(plan, fails).faults} == needed


def test_world_without_faults_keeps_every_guarantee() -> None:
    outcome = play(make(5).only([]))
    assert outcome.sentence == ""
    assert "resumed" in outcome.seen


def test_trace_lists_faults_and_decisions() -> None:
    assert any(who == "fault" for _, who, _ in trace())
    assert any("generation: " in f"{who}: {words}" for _, who, words in trace())
