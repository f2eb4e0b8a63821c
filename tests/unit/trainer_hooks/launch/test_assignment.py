from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec, JobSpec, Member, RestoreRule
from everstep_trainer.launch.assignment import (
    RANK_PID_VARIABLE,
    current_assignment,
    enter_environment,
    leave_environment,
    parent_rank,
    torchrun_environment,
    wait_for_local_rank,
)


def generation(*members: tuple[str, int], number: int = 3) -> GenerationSpec:
    seats = tuple(dict.fromkeys(node for node, _ in members))
    return GenerationSpec(
        job="run7",
        number=number,
        reason=GenerationReason.FORMED,
        sentence="",
        trace="",
        seats=seats,
        store="10.0.0.5:4711",
        store_node="n2",
        restore=RestoreRule(from_scratch=True),
        holders=(),
        replica_nodes={},
        secret="00",
        spec=JobSpec(job="run7", max_nodes=2, nproc_per_node=len(members) // len(seats)),
        issued_at=0.0,
    )


def test_generation_sets_the_torchrun_environment() -> None:
    spec = generation(("n2", 0), ("n2", 1), ("n1", 0), ("n1", 1))
    environment = torchrun_environment(spec, spec.roster[3])
    assert environment == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.5",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "run7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Set the variables of a rank of run7 for the test."""
    before = dict(os.environ)
    os.environ["EVERSTEP_JOB"] = "run7"
    spec = generation(("n1", 0), ("n1", 1))
    enter_environment(spec, spec.roster[1])
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def child_environment() -> dict[str, str]:
    listed = subprocess.run(["env", "-0"], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in listed.split("\0") if line)


def test_child_programs_do_not_get_the_rendezvous(environment: pytest.MonkeyPatch) -> None:
    """They keep the rank, by which loaders' workers divide their data, but cannot wait for the other ranks."""
    child = child_environment()
    assert (child["RANK"], child["WORLD_SIZE"], child["LOCAL_RANK"]) == ("1", "2", "1")
    assert not child.keys() & {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
    assert os.environ["MASTER_PORT"] == "4711"


def test_child_of_a_rank_knows_and_forgets_its_place(environment: pytest.MonkeyPatch) -> None:
    assert parent_rank() is None
    environment.setenv(RANK_PID_VARIABLE, "1")
    assert parent_rank() == "1"
    leave_environment()
    assert parent_rank() is None
    assert not os.environ.keys() & torchrun_environment(*_first_member()).keys()


def _first_member() -> tuple[GenerationSpec, Member]:
    spec = generation(("n1", 0))
    return spec, spec.roster[0]


def test_process_outside_the_launcher_has_no_assignment() -> None:
    assert current_assignment() is None
    with pytest.raises(RuntimeError, match="start it with everstep-launch"):
        wait_for_local_rank()


def test_a_child_of_a_worker_has_no_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WORKER_PID", str(os.getppid()))
    assert current_assignment() is None
