"""How many unfinished jobs a node may offer itself to, and what each further offer costs the controller."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from everstep_controller.core.effects import DeleteJob, Send
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.jobs import membership
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.directives import StopJob
from tests.support.core_fleet import CoreFleet, audits, sent

LAB = CorePolicy.lab_preset()
FEW = msgspec.structs.replace(LAB, jobs_per_node=3)
HOUR = 3600.0


class _Lookups(dict[str, JobRecord]):
    """Jobs by name that count how often one is looked up."""

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
    """The node's launchers offer it to jobs that need another node, and so wait."""
    for job in jobs:
        fleet.join(node, job=job, min_nodes=2, max_nodes=2, join_wait_s=HOUR)


def run(fleet: CoreFleet, node: str, *jobs: str) -> None:
    for job in jobs:
        fleet.join(node, job=job, min_nodes=1, max_nodes=1, join_wait_s=0.0)


def stops(fleet: CoreFleet, node: str, job: str) -> list[StopJob]:
    bodies = [effect.body for effect in fleet.effects if isinstance(effect, Send) and effect.node == node]
    return [body for body in bodies if isinstance(body, StopJob) and body.job == job]


# --- the cap -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("bounded-node")
def test_job_beyond_node_limit_is_refused() -> None:
    fleet = fleet_of("n1")
    wait(fleet, "n1", "a", "b", "c", "d")
    assert list(fleet.state.jobs) == ["a", "b", "c"]
    (stop,) = stops(fleet, "n1", "d")
    assert not stop.ok
    assert "n1 has 3 unfinished jobs" in stop.reason
    assert "everstep job stop" in stop.reason
    assert "jobs_per_node" in stop.reason
    assert audits(fleet.effects, "launcher.refused") == [stop.reason]


def test_spare_beyond_node_limit_is_refused() -> None:
    fleet = fleet_of("n1", "n2")
    wait(fleet, "n1", "a", "b", "c")
    wait(fleet, "n2", "d")
    wait(fleet, "n1", "d")
    assert list(fleet.job("d").membership.launchers) == ["n2"]
    assert len(stops(fleet, "n1", "d")) == 1


def test_ended_job_frees_room_on_its_node() -> None:
    fleet = fleet_of("n1")
    wait(fleet, "n1", "a", "b", "c")
    fleet.order(OperatorAction.STOP_JOB, job="b")
    wait(fleet, "n1", "d")
    assert fleet.job_state("d") is JobState.FORMING


def test_job_left_by_a_launcher_frees_room_on_the_node() -> None:
    fleet = fleet_of("n1", "n2")
    wait(fleet, "n1", "a", "b", "c")
    fleet.join("n2", job="b")
    fleet.leave("n1", job="b")
    wait(fleet, "n1", "d")
    assert list(fleet.job("d").membership.launchers) == ["n1"]


def test_finished_job_beyond_node_limit_does_not_rerun() -> None:
    fleet = fleet_of("n1")
    run(fleet, "n1", "a")
    fleet.order(OperatorAction.STOP_JOB, job="a")
    wait(fleet, "n1", "b", "c", "d")
    fleet.launchers["a", "n1"] = int(fleet.now * 1000)
    run(fleet, "n1", "a")
    assert fleet.job_state("a") is JobState.FAILED
    assert "unfinished jobs" in stops(fleet, "n1", "a")[-1].reason


def test_job_limit_survives_controller_restart() -> None:
    fleet = fleet_of("n1")
    wait(fleet, "n1", "a", "b", "c")
    fleet.restart()
    fleet.beat("n1")
    wait(fleet, "n1", "d")
    assert list(fleet.state.jobs) == ["a", "b", "c"]


# --- launchers in a restart loop ---------------------------------------------------------------------------------


def test_launcher_restarting_under_one_name_is_never_refused() -> None:
    fleet = fleet_of("n1")
    for _ in range(20):
        wait(fleet, "n1", "a")
        fleet.leave("n1", job="a")
    assert list(fleet.state.jobs) == ["a"]
    assert stops(fleet, "n1", "a") == []


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


def test_paused_job_is_not_dropped_for_another() -> None:
    fleet = fleet_of("n1")
    for name in ("a", "b", "c"):
        run(fleet, "n1", name)
        fleet.resume(name)
        fleet.leave("n1", job=name)
    assert {fleet.job_state(name) for name in ("a", "b", "c")} == {JobState.PAUSED}
    run(fleet, "n1", "d")
    assert "d" not in fleet.state.jobs
    assert fleet.node_state("n1") is NodeState.HEALTHY


# --- what an offer costs -----------------------------------------------------------------------------------------


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


def test_owner_of_a_node_follows_the_jobs() -> None:
    fleet = fleet_of("n1", "n2")
    for node in ("n1", "n2"):
        fleet.join(node, job="a", min_nodes=1, max_nodes=2)
    fleet.resume("a")
    assert fleet.state.job_by_node == {"n1": "a", "n2": "a"}
    fleet.leave("n2", job="a")
    assert fleet.state.job_by_node == {"n1": "a"}
    fleet.leave("n1", job="a")
    assert fleet.job_state("a") is JobState.PAUSED
    assert fleet.state.job_by_node == {}
    fleet.join("n1", job="a")
    fleet.advance(1.0, "n1", "n2")
    assert fleet.state.job_by_node == {"n1": "a"}
    fleet.restart()
    assert fleet.state.job_by_node == {"n1": "a"}
    fleet.order(OperatorAction.STOP_JOB, job="a")
    assert fleet.state.job_by_node == {}


@pytest.mark.parametrize("waited_s", [0.0, HOUR])
def test_job_below_its_minimum_forms_in_linear_time(waited_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody works out a roster, or what others could spare, before there are enough launchers."""
    judged: list[str] = []
    judge = membership.unfit_reason

    def counted(state: FleetState, job: JobRecord, node: str, staying: Collection[str] = ()) -> str:
        judged.append(node)
        return judge(state, job, node, staying)

    names = [f"n{number}" for number in range(60)]
    fleet = fleet_of(*names)
    monkeypatch.setattr(membership, "unfit_reason", counted)
    fleet.join(names[0], job="a", min_nodes=60, max_nodes=60, join_wait_s=0.0)
    fleet.job("a").status.since -= waited_s
    for name in names[1:]:
        fleet.join(name, job="a")
    assert fleet.job_state("a") is JobState.RUNNING
    assert len(judged) <= 4 * len(names)
