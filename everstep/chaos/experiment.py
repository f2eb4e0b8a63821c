"""Carry out one fault: choose its target, refuse what would end the job, strike, and follow the recovery."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import msgspec

from everstep.chaos import faults
from everstep.chaos.faults import Fault
from everstep.chaos.recovery import FaultReport, JobWatch
from everstep.chaos.targets import FLIP_SIGNAL, LocalNode
from everstep.errors import ConfigurationError, Conflict
from everstep.host.processes import Process
from everstep.vocabulary import JobState
from everstep.wire.v1.operator import JobDetail

LASTING_S = {Fault.SLOW: 20.0, Fault.PARTITION: 10.0}
"""Default duration of faults that last. A job may survive them without a new generation."""


class FaultTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault strikes: a rank, its process, and its node on this machine."""

    rank: int
    process: Process
    node: LocalNode


def find_target(
    detail: JobDetail, nodes: Iterable[LocalNode], rank: int | None, choose: Callable[[list[FaultTarget]], FaultTarget]
) -> FaultTarget:
    """Return the given rank of the job's newest generation, or one that ``choose`` takes from those on this machine.

    Raises ConfigurationError if there is none here.
    """
    members = {(member.node, member.local_rank): member.rank for member in detail.roster}
    names = {member.node for member in detail.roster}
    here = []
    for node in nodes:
        name = node.name or (next(iter(names)) if len(names) == 1 else "")
        for local_rank, process in node.ranks.items():
            if (number := members.get((name, local_rank))) is not None:
                here.append(FaultTarget(rank=number, process=process, node=msgspec.structs.replace(node, name=name)))
    if not here:
        unknown = any(not node.name for node in nodes)
        reason = "the file agent.json of this node's agent cannot be read" if unknown else "this node may be a spare"
        raise ConfigurationError(f"no rank of job {detail.summary.job} is known on this machine: {reason}")
    if rank is None:
        return choose(here)
    for target in here:
        if target.rank == rank:
            return target
    known = ", ".join(str(target.rank) for target in sorted(here, key=lambda target: target.rank))
    raise ConfigurationError(f"rank {rank} is not on this machine; ranks here: {known}")


def require_allowed(fault: Fault, target: FaultTarget, detail: JobDetail, *, confirmed: bool) -> None:
    """Raise ConfigurationError, or Conflict, unless the fault may be brought about.

    ``confirmed``: the person knows that the job is a fleet's, or that it will pause.
    """
    node, job = target.node, detail.summary
    if fault is Fault.FLIP:
        faults.require_flips(target.process)
        if detail.spec.digest_interval == 0:
            raise Conflict(
                "the job computes no digests (--digest-interval 0), so nothing would find the flipped bit and the "
                "training would continue with it"
            )
    if fault is Fault.NODE and len({member.node for member in detail.roster}) + len(detail.spares) < 2:
        raise Conflict(
            f"{node.name} is the only node of job {job.job}: nothing would be left to recover. Give the job another "
            "node (--nnodes), or use kill"
        )
    if fault in (Fault.NODE, Fault.PARTITION) and (node.agent is None or node.agent.user != node.launcher.user):
        raise Conflict("the agent of this node runs as another user, or is not known: run the command as that user")
    if fault is Fault.NODE and node.has_controller:
        raise Conflict(
            f"the launcher of {node.name} runs the job's controller, and the job would end with it: choose a rank of "
            "another node with --rank"
        )
    if confirmed:
        return
    if not node.is_private:
        raise ConfigurationError(
            f"job {job.job} runs on a fleet: {fault} would strike {describe(fault, target)}, and all "
            f"{job.world_size} ranks on {job.nodes} nodes would stop until they have recovered. Repeat with --yes"
        )
    if fault is Fault.NODE and job.nodes + job.spares - 1 < detail.spec.min_nodes:
        raise ConfigurationError(
            f"job {job.job} needs {detail.spec.min_nodes} nodes and would pause without {node.name} until a node "
            "joins. Repeat with --yes"
        )


def describe(fault: Fault, target: FaultTarget) -> str:
    """Return what the fault strikes, in words."""
    node = target.node
    if fault is Fault.PARTITION and node.agent is not None:
        return f"the agent of {node.name} (process {node.agent.pid})"
    if fault is Fault.NODE:
        return f"all of {node.name}: its agent, launcher (process {node.launcher.pid}) and {len(node.ranks)} ranks"
    return f"rank {target.rank} on {node.name} (process {target.process.pid})"


def run_experiment(
    fault: Fault,
    watch: JobWatch,
    nodes: list[LocalNode],
    *,
    rank: int | None = None,
    seconds: float = 0.0,
    timeout_s: float = 120.0,
    confirmed: bool = False,
) -> FaultReport:
    """Bring about one fault and follow the job until it has recovered, or for ``timeout_s`` seconds.

    ``rank``: the struck one, or one of the struck node; None: a random one on this machine. ``seconds``: duration of a
    fault that lasts. Raises ConfigurationError or Conflict if it may not, or cannot, be brought about.
    """
    job = watch.detail.summary
    if job.state is not JobState.RUNNING:
        raise Conflict(f"job {job.job} is {job.state}: a fault needs a running job")
    if fault is Fault.NODE and rank is None:  # a private run does not survive the node with its controller
        nodes = [node for node in nodes if not node.has_controller] or nodes
    target = find_target(watch.detail, nodes, rank, random.choice)
    require_allowed(fault, target, watch.detail, confirmed=confirmed)
    struck, process, agent = describe(fault, target), target.process, target.node.agent
    with ExitStack() as stack:
        watch.strike()
        match fault:
            case Fault.KILL:
                faults.signal_or_raise(process, signal.SIGKILL)
                action = f"SIGKILL to {struck}"
            case Fault.HANG:
                stack.enter_context(faults.stopped(process))
                action = f"SIGSTOP to {struck}"
            case Fault.FLIP:
                faults.signal_or_raise(process, FLIP_SIGNAL)
                action = f"one bit flipped in the parameters of {struck}"
            case Fault.NODE:
                faults.kill_node(target.node)
                action = f"SIGKILL to {struck}"
            case Fault.SLOW:
                with faults.slowed(process):
                    watch.observe(seconds)
                action = f"a quarter of the time to run, for {seconds:g} s, for {struck}"
            case Fault.PARTITION:
                assert agent is not None
                with faults.stopped(agent):
                    watch.observe(seconds)
                action = f"SIGSTOP for {seconds:g} s to {struck}"
        recovered = watch.await_recovery(timeout_s, regroups=fault not in LASTING_S)
    return watch.report(str(fault), action, recovered=recovered, conclusion=_conclusion(fault, watch, recovered))


def _conclusion(fault: Fault, watch: JobWatch, recovered: bool) -> str:
    job = watch.detail.summary
    if recovered and job.state is JobState.FINISHED:
        return f"recovered: job {job.job} has finished at step {job.step}"
    if recovered and watch.regrouped:
        return f"recovered: all {job.world_size} ranks step again in generation {job.generation}"
    if recovered:
        return f"recovered: the job went on in generation {job.generation} without regrouping"
    if fault is Fault.FLIP and not watch.regrouped and job.state is JobState.RUNNING:
        return (
            "not recovered: no digest showed the flipped bit, and the training continues with it. Only parameters that "
            "several ranks hold alike are compared; sharded ones are not. Start again from a checkpoint"
        )
    return f"not recovered: job {job.job} is {job.state}: {job.reason}"
