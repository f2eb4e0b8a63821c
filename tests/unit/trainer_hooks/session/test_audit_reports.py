"""A rank sends its audit statements at once, and clean steps at most once a second."""

from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everstep.clock import ManualClock
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import AuditsClean, AuditStatement, Resumed
from everstep_trainer.base.progress import total_compile_s
from everstep_trainer.config import HookSettings
from everstep_trainer.launch import assignment
from everstep_trainer.run import Run
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.session.generation_session import GenerationSession, PhaseTimeline
from everstep_trainer.worker import rank_worker
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks import training_functions
from tests.support.ranks.node_ranks import NodeRanks, node_ranks


def _session(clock: ManualClock, sent: list[Any]) -> GenerationSession:
    spec, nothing = generation(3), SimpleNamespace()
    return GenerationSession(
        SimpleNamespace(spec=spec, member=spec.roster[0], store=None, device=torch.device("cpu")),  # type: ignore[arg-type]
        directives=nothing,  # type: ignore[arg-type]
        progress=nothing,  # type: ignore[arg-type]
        interrupter=nothing,  # type: ignore[arg-type]
        connect_vault=lambda: nothing,  # type: ignore[arg-type,return-value]
        send=sent.append,
        timeline=None,
        clock=clock,
    )


def test_clean_audits_are_reported_once_a_second() -> None:
    clock, sent = ManualClock(), list[Any]()
    session = _session(clock, sent)
    for step in range(10):
        session.report_clean_audits(step)
        clock.advance(0.3)
    assert [(type(statement), statement.generation, statement.step) for statement in sent] == [
        (AuditsClean, 3, 0),
        (AuditsClean, 3, 4),
        (AuditsClean, 3, 8),
    ]


def test_statement_has_all_that_the_audit_says() -> None:
    clock, sent = ManualClock(), list[Any]()
    mismatch = Mismatch(
        audit=AuditKind.PEER_REPLAY,
        step=7,
        unit="layer 0",
        owner=0,
        role=AuditRole.OWNER,
        original="a",
        digest="b",
        expects_arbiter=True,
        difference="one bit",
    )
    _session(clock, sent).report_mismatch(mismatch)
    (one,) = sent
    assert isinstance(one, AuditStatement)
    assert (one.generation, one.rank, one.step, one.audit) == (3, 0, 7, AuditKind.PEER_REPLAY)
    assert (one.original, one.digest, one.expects_arbiter, one.difference) == ("a", "b", True, "one bit")


def test_wrong_product_goes_to_the_agent_of_its_node() -> None:
    sent = list[Any]()
    product = WrongProduct(work="up", dtype="float32", rows=1, inner=1, columns=1, left=b"0000", right=b"0000")
    _session(ManualClock(), sent).keep_wrong_product(product)
    assert sent == [product]


def test_timeline_separates_a_part_of_a_phase() -> None:
    timeline = PhaseTimeline(perf_counter() - 10.0)
    timeline.end("first_step")
    whole = timeline.phases_s["first_step"]
    timeline.split_off("compile", "first_step", 4.0)
    assert timeline.phases_s == {"first_step": whole - 4.0, "compile": 4.0}
    timeline.split_off("compile", "first_step", 100.0)
    assert timeline.phases_s == {"first_step": 0.0, "compile": pytest.approx(whole)}


@pytest.mark.slow
def test_compilations_are_counted_in_seconds() -> None:
    before = total_compile_s()
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert total_compile_s() > before
    torch.compiler.reset()


def compile_a_step(run: Run) -> None:
    """Make each step compute a function that was compiled in the first step of its generation."""
    torch.compiler.reset()
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    for _ in run.steps(until=training_functions.STEPS):
        model(torch.ones(1, 2)).sum().backward()


def play_one_without_a_standby(socket_path: str, began: float) -> None:
    """In a process of its own: a rank that was forked at ``began`` in place of one that died."""
    rank_worker.REPLACEMENT_WAIT_S = 60.0
    mine = assignment.WorkerAssignment(job=JOB, agent_socket=socket_path, local_rank=0, started_at=began)
    rank_worker.Worker(mine, HookSettings(backend="gloo"), SYSTEM_CLOCK).run(compile_a_step)


def play_alone(scene: NodeRanks, forks: ForkPool, began: float) -> None:
    scene.ranks[0] = forks.start(play_one_without_a_standby, str(scene.agent.path), began)
    scene.peer(0)


def test_resumed_separates_start_and_compile_time(forks: ForkPool) -> None:
    with node_ranks(forks, compile_a_step) as scene:
        play_alone(scene, forks, perf_counter() - 100.0)
        scene.send(NewGeneration(spec=scene.generation(1, 0)))
        (first,) = scene.wait_for_messages(Resumed, 1, where=lambda m: m.generation == 1)
        assert first.phases_s["start"] >= 100.0
        assert first.phases_s["compile"] > 0.0
        assert {"wait", "rendezvous", "first_step"} <= first.phases_s.keys()
        scene.form_generation(2, 0)
        (second,) = scene.wait_for_messages(Resumed, 1, where=lambda m: m.generation == 2)
        assert "start" not in second.phases_s, "the process was there"
        assert second.phases_s["compile"] > 0.0
