"""A fault is refused if it would end the job or hit a fleet without consent; targets are chosen here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.chaos import faults
from everstep.chaos.experiment import FaultTarget, describe, find_target, require_allowed
from everstep.chaos.faults import Fault
from everstep.chaos.targets import LocalNode
from everstep.errors import ConfigurationError, Conflict
from everstep.host.processes import Process
from everstep.vocabulary import JobState
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import JobSpec, Member


def process(pid: int, user: int = 1000) -> Process:
    return Process(pid=pid, parent=1, user=user, name="p", state="S", started=1)


def local(name: str = "b", **changed: Any) -> LocalNode:
    known: dict[str, Any] = {"is_private": True, "controller": "", "has_controller": False, "agent": process(9)}
    return LocalNode(
        job="llama",
        name=name,
        launcher=process(10),
        processes=(process(10), process(20), process(21)),
        ranks={0: process(20), 1: process(21)},
        **known | changed,
    )


def detail(nodes: tuple[str, ...] = ("a", "b"), spares: tuple[str, ...] = (), **spec: Any) -> op.JobDetail:
    """A job with two ranks on each node."""
    members = [
        Member(rank=2 * n + local, node=node, local_rank=local) for n, node in enumerate(nodes) for local in (0, 1)
    ]
    world = len(members)
    job = op.JobSummary(
        job="llama", state=JobState.RUNNING, generation=1, world_size=world, nodes=len(nodes), spares=len(spares)
    )
    job_spec = msgspec.structs.replace(JobSpec(job="llama", nproc_per_node=2), **spec)
    return op.JobDetail(summary=job, spec=job_spec, roster=tuple(members), spares=spares)


def target(node: LocalNode | None = None) -> FaultTarget:
    return FaultTarget(rank=2, process=process(20), node=node or local())


def test_rank_is_chosen_among_those_here() -> None:
    found = find_target(detail(), [local()], None, lambda here: here[-1])
    assert found.rank == 3
    with pytest.raises(ConfigurationError, match="rank 0 is not on this machine; ranks here: 2, 3"):
        find_target(detail(), [local()], 0, lambda here: here[0])


def test_unnamed_node_is_the_jobs_only_one() -> None:
    found = find_target(detail(("a",)), [local("")], 1, lambda here: here[0])
    assert (found.rank, found.node.name) == (1, "a")
    with pytest.raises(ConfigurationError, match=r"agent\.json"):
        find_target(detail(), [local("")], 1, lambda here: here[0])
    with pytest.raises(ConfigurationError, match="spare"):
        find_target(detail(), [local("c")], None, lambda here: here[0])


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.HANG, Fault.SLOW, Fault.PARTITION, Fault.NODE])
def test_private_run_needs_no_consent(fault: Fault) -> None:
    require_allowed(fault, target(), detail(), confirmed=False)


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.HANG, Fault.SLOW, Fault.PARTITION, Fault.NODE])
def test_fleets_job_needs_consent_and_is_described(fault: Fault) -> None:
    struck = target(local(is_private=False))
    with pytest.raises(ConfigurationError, match=r"all 4 ranks on 2 nodes .*--yes") as refused:
        require_allowed(fault, struck, detail(), confirmed=False)
    assert describe(fault, struck) in str(refused.value)
    require_allowed(fault, struck, detail(), confirmed=True)


@pytest.mark.parametrize(
    ("node", "job", "message"),
    [
        (local(), detail(("b",)), "only node"),
        (local(has_controller=True), detail(), "job's controller"),
        (local(agent=None), detail(), "agent of this node"),
        (local(agent=process(9, user=0)), detail(), "runs as another user"),
    ],
)
def test_fatal_node_losses_are_refused(node: LocalNode, job: op.JobDetail, message: str) -> None:
    with pytest.raises(Conflict, match=message):
        require_allowed(Fault.NODE, target(node), job, confirmed=True)


def test_pausing_node_loss_needs_consent() -> None:
    job = detail(min_nodes=2, max_nodes=2)
    with pytest.raises(ConfigurationError, match="needs 2 nodes and would pause"):
        require_allowed(Fault.NODE, target(), job, confirmed=False)
    require_allowed(Fault.NODE, target(), job, confirmed=True)
    require_allowed(Fault.NODE, target(), detail(spares=("c",), min_nodes=2, max_nodes=2), confirmed=False)


def test_flip_needs_the_ranks_consent_and_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Conflict, match="--allow-bit-flips"):
        require_allowed(Fault.FLIP, target(), detail(), confirmed=True)
    monkeypatch.setattr(faults, "has_signal_handler", lambda pid, number: True)
    require_allowed(Fault.FLIP, target(), detail(), confirmed=False)
    with pytest.raises(Conflict, match="--digest-interval 0"):
        require_allowed(Fault.FLIP, target(), detail(digest_interval=0), confirmed=False)
