"""Reports of an ended generation or of an ended launcher change nothing."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.errors import EverstepError
from everstep.ids import Version
from everstep.wire.v1.training import (
    AnyReport,
    CollectiveFailed,
    LauncherJoined,
    LauncherLeft,
    RankFinished,
    RankLost,
    RankStalled,
    RankUnresponsive,
    Resumed,
    UserError,
    VersionSealed,
)
from everstep_controller.core.effects import PutFleet, PutGeneration, PutJob, PutNode, PutVerdict, PutVersion
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import FleetState, HeartbeatState, NodeRuntime
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.plugins.example_counts import examples
from tests.unit.controller.core.test_core_random import Act, histories, rank, step

JOB = "a"
DECIDED = (PutFleet, PutGeneration, PutJob, PutNode, PutVerdict, PutVersion)


def _said(kind: type[Any], at: float, generation: int, rank: int, step: int) -> AnyReport:
    """A report of the kind by the first rank of a node."""
    rest: dict[type[Any], dict[str, Any]] = {
        CollectiveFailed: {"step": step, "detail": ""},
        RankStalled: {"step": step, "collectives": step, "stalled_s": 1.0, "threshold_s": 1.0},
        RankUnresponsive: {"local_rank": 0, "unresponsive_s": 1.0},
        RankLost: {"local_rank": 0, "detail": "", "has_replacement": True},
        Resumed: {"step": step, "restored": None, "phases_s": {"abort": 0.1}},
        VersionSealed: {
            "version": Version(generation, step),
            "bytes": 1,
            "durable": True,
            "commit_candidate": True,
            "digests": {"w": "d"},
        },
        UserError: {"step": step, "error": "ValueError", "traceback": ""},
        RankFinished: {"step": step},
    }
    words: AnyReport = kind(job=JOB, at=at, generation=generation, rank=rank, **rest[kind])
    return words


OF_GENERATIONS = (
    CollectiveFailed,
    RankStalled,
    RankUnresponsive,
    RankLost,
    Resumed,
    VersionSealed,
    UserError,
    RankFinished,
)


def _known(state: FleetState) -> dict[str, object]:
    """Return the whole state, without the times of messages, and the ignored reports."""
    live_nodes = {
        name: msgspec.structs.replace(live, heartbeats=HeartbeatState()) for name, live in state.node_runtime.items()
    }
    assert all(isinstance(live, NodeRuntime) for live in live_nodes.values())
    parts = (
        state.fleet,
        state.nodes,
        live_nodes,
        state.jobs,
        state.job_runtime,
        state.diagnostics.probes,
        state.diagnostics.blame_cases,
        state.deadline_queue.entries,
    )
    return {str(place): copy.deepcopy(part) for place, part in enumerate(parts)}


def _changes_nothing(fleet: CoreFleet, node: str, words: AnyReport) -> None:
    before = _known(fleet.state)
    effects = fleet.report(node, words)
    assert not [effect for effect in effects if isinstance(effect, DECIDED)]
    assert _known(fleet.state) == before


def _hear_until_settled(fleet: CoreFleet, node: str) -> None:
    """What follows from the node's being there, by one event or by two, is no matter of what the node says."""
    fleet.mark_seen(node)
    fleet.mark_seen(node)


def _after(history: list[Act]) -> CoreFleet:
    fleet = CoreFleet(CorePolicy.lab_preset())
    fleet.register("n1", "n2", "n3", "n4", "n5")
    fleet.join("n1", "n2", "n3", "n4", job=JOB, min_nodes=2, max_nodes=4, nproc_per_node=2, join_wait_s=1.0)
    fleet.resume(JOB)
    fleet.lose_rank(1, job=JOB)
    for act in history:
        try:
            act(fleet)
        except EverstepError:
            continue
    return fleet


@pytest.mark.parametrize("kind", OF_GENERATIONS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(histories, st.integers(1, 6), rank, step)
def test_report_of_ended_generation_changes_nothing(
    kind: type[Any], history: list[Act], number: int, some_rank: int, at_step: int
) -> None:
    fleet = _after(history)
    record = fleet.state.jobs[JOB]
    for node, launcher in list(record.membership.launchers.items()):
        _hear_until_settled(fleet, node)
        spoken_of = {spec.number for spec in (record.generation, record.outgoing_generation) if spec is not None}
        if number in spoken_of or launcher.missing_local_ranks:  # a replacement takes a place in whatever generation
            continue
        seat = record.generation.member_at(node, 0) if record.generation is not None else None
        mine = some_rank if seat is None else seat.rank
        _changes_nothing(fleet, node, _said(kind, fleet.now, number, mine, at_step))


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(histories, st.booleans(), st.booleans())
def test_report_of_earlier_launcher_changes_nothing(history: list[Act], joins: bool, orderly: bool) -> None:
    fleet = _after(history)
    record = fleet.state.jobs[JOB]
    for node, launcher in list(record.membership.launchers.items()):
        _hear_until_settled(fleet, node)
        life = launcher.incarnation - 1
        left = LauncherLeft(job=JOB, at=fleet.now, launcher=life, orderly=orderly)
        again = LauncherJoined(job=JOB, at=fleet.now, spec=record.spec, launcher=life, store="x:1")
        _changes_nothing(fleet, node, again if joins else left)
