"""The limit of unfinished jobs per node, and the cost of a further join for the controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everstep.vocabulary import JobState
from everstep.wire.v1.directives import StopJob
from everstep_controller.core.effects import DeleteJob, Send
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences, sent

LAB = CorePolicy.lab_preset()
FEW = LAB.with_values(jobs={"per_node": 3})
HOUR = 3600.0


class _Lookups(dict[str, JobRecord]):
    """Jobs by name, with a count of lookups."""

    count = 0

    def __getitem__(self, name: str) -> JobRecord:
        self.count += 1
        return super().__getitem__(name)


@contextmanager
def lookups(fleet: CoreFleet) -> Iterator[_Lookups]:
    counted = fleet.state.jobs = _Lookups(fleet.state.jobs)
    yield counted
    fleet.state.jobs = dict(counted)


def fleet_of(*nodes: str, policy: CorePolicy = FEW) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.register(*nodes)
    for node in nodes:
        fleet.beat(node)
    return fleet


def wait(fleet: CoreFleet, node: str, *jobs: str) -> None:
    """Launchers on the node join jobs that need another node, and so wait."""
    for job in jobs:
        fleet.join(node, job=job, min_nodes=2, max_nodes=2, join_wait_s=HOUR)


def run(fleet: CoreFleet, node: str, *jobs: str) -> None:
    for job in jobs:
        fleet.join(node, job=job, min_nodes=1, max_nodes=1, join_wait_s=0.0)


def stops(fleet: CoreFleet, node: str, job: str) -> list[StopJob]:
    bodies = [effect.body for effect in fleet.effects if isinstance(effect, Send) and effect.node == node]
    return [body for body in bodies if isinstance(body, StopJob) and body.job == job]


@pytest.mark.promise("bounded-node")
def test_job_beyond_node_limit_is_refused() -> None:
    fleet = fleet_of("n1")
    wait(fleet, "n1", "a", "b", "c", "d")
    assert list(fleet.state.jobs) == ["a", "b", "c"]
    (stop,) = stops(fleet, "n1", "d")
    assert not stop.ok
    assert "n1 has 3 unfinished jobs" in stop.reason
    assert "everstep job stop" in stop.reason
    assert "policy.jobs.per_node" in stop.reason
    assert logged_sentences(fleet.effects, "launcher.refused") == [stop.reason]


def test_spare_beyond_node_limit_is_refused() -> None:
    fleet = fleet_of("n1", "n2")
    wait(fleet, "n1", "a", "b", "c")
    wait(fleet, "n2", "d")
    wait(fleet, "n1", "d")
    assert list(fleet.job("d").membership.launchers) == ["n2"]
    assert len(stops(fleet, "n1", "d")) == 1


def test_finished_job_beyond_node_limit_does_not_rerun() -> None:
    fleet = fleet_of("n1")
    run(fleet, "n1", "a")
    fleet.order(OperatorAction.STOP_JOB, job="a")
    wait(fleet, "n1", "b", "c", "d")
    fleet.launchers["a", "n1"] = int(fleet.now * 1000)
    run(fleet, "n1", "a")
    assert fleet.job_state("a") is JobState.FAILED
    assert "unfinished jobs" in stops(fleet, "n1", "a")[-1].reason


def test_launcher_restarting_under_new_names_is_never_refused() -> None:
    fleet = fleet_of("n1")
    names = [f"job-{number}" for number in range(20)]
    for name in names:
        wait(fleet, "n1", name)
        fleet.leave("n1", job=name)
        fleet.now += 1.0
    assert list(fleet.state.jobs) == names[-3:]
    assert sent(fleet.effects, StopJob) == {}
    assert [effect.job for effect in fleet.effects if isinstance(effect, DeleteJob)] == names[:-3]


@pytest.mark.promise("bounded-node")
@pytest.mark.parametrize("ended", [10, 200])
def test_join_cost_is_independent_of_ended_jobs(ended: int) -> None:
    fleet = fleet_of("n1")
    for number in range(ended):
        run(fleet, "n1", f"old-{number}")
        fleet.order(OperatorAction.STOP_JOB, job=f"old-{number}")
    with lookups(fleet) as counted:
        fleet.join("n1", job="new", min_nodes=1, max_nodes=1, join_wait_s=0.0)
        assert fleet.job_state("new") is JobState.RUNNING
    assert counted.count < 30
