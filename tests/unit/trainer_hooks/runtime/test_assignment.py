from __future__ import annotations

import os

import pytest
from everstep_trainer.runtime.assignment import current_assignment, torchrun_environment, wait_for_local_rank

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule


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


def test_process_outside_the_launcher_has_no_assignment() -> None:
    assert current_assignment() is None
    with pytest.raises(RuntimeError, match="start it with everstep-launch"):
        wait_for_local_rank()


def test_a_child_of_a_worker_has_no_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WORKER_PID", str(os.getppid()))
    assert current_assignment() is None
