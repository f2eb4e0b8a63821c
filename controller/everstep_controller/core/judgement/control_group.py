"""Decide whether the program, and no hardware, makes an audit differ.

All ranks do an audit in the same step. A GPU that computes wrongly contradicts itself alone. A hook, a replaced forward
pass or a write through ``.data`` shows on all ranks that run it. So the ranks of one audit are each other's control
group. The node is what counts, since the GPUs of a node share its memory, its power and its buses:

- Nodes: half of the job's nodes or more are accused, and at least two; or ``MANY_NODES``, in a job of any size.
- Ranks: where a job has one node, half of its ranks or more, and at least two. One of two ranks that contradicts itself
  is not cleared, as the other one did the same audit and found nothing.
- Ties: ranks that differ from others count by rank, not by node, as a tie names a sound rank, too. In a job of two
  nodes each difference is a tie, so nothing follows from ties there.
- All ranks of one node, and of no other one, are that node's fault.
- A job of one rank has no control group: nothing is judged there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from everstep.vocabulary import AuditKind
from everstep_controller.core.state import Accusation
from everstep_controller.core.wording import join_names, ranks_named

MANY_NODES = 4
"""Accused nodes that have a common cause in a job of any size: faults of hardware do not begin in one step."""
MIN_NODES_WITH_TIES = 3
MAX_UNITS = 4
"""Most modules or parameters named in a sentence."""

LIKELY_CAUSES: Mapping[AuditKind, str] = {
    AuditKind.MATMUL: "a layer whose forward pass was replaced (quantisation), or weights written between the passes",
    AuditKind.GRADIENT_NORM: "samples that all ranks share",
    AuditKind.GRADIENT_BUFFER: (
        "a hook that changes gradients once they are accumulated, or a backward pass whose gradients are not sent "
        "(no_sync)"
    ),
    AuditKind.COLLECTIVE: (
        "gradients changed between their exchange and the update, gradients kept back by no_sync, or layers unfrozen "
        "after the model was wrapped"
    ),
    AuditKind.PEER_REPLAY: (
        "a module that keeps state outside of its parameters and buffers, or that draws from a random generator of its "
        "own"
    ),
    AuditKind.UPDATE: "a hook of the optimizer that changes gradients or parameters, such as clipping",
    AuditKind.STATE: "parameters or moments written between two updates, such as by an EMA swap or by weight clipping",
    AuditKind.CHECKPOINT: "state that the program writes while it is copied",
}
"""What programs do that makes each audit differ."""
VOTE_CAUSES = (
    "layers unfrozen after the model was wrapped, a second forward pass under no_sync, or parameters that differ "
    "between ranks by design (they must be DTensors, or be tracked under names of their own)"
)
"""What programs do that makes the parameters of replicas differ."""


def has_common_cause(accusations: Collection[Accusation], seats: int, world_size: int) -> bool:
    """Return whether so much of the control group is accused that the program is the cause.

    Args:
        accusations: Those of one audit in one step.
        seats: The number of nodes of the job.
        world_size: The number of ranks of the job.
    """
    ranks, nodes = {accusation.rank for accusation in accusations}, {accusation.node for accusation in accusations}
    if len(ranks) < 2:
        return False
    if seats == 1:
        return 2 * len(ranks) >= world_size
    if are_too_many(_accused_alone(accusations), seats):
        return True
    return seats >= MIN_NODES_WITH_TIES and len(nodes) >= 2 and 2 * len(ranks) >= world_size


def _accused_alone(accusations: Iterable[Accusation]) -> set[str]:
    return {accusation.node for accusation in accusations if not accusation.is_tie}


def are_too_many(nodes: Collection[str], seats: int) -> bool:
    """Return whether that many accused nodes of a job on ``seats`` nodes have a cause in common."""
    return len(nodes) >= 2 and (2 * len(nodes) >= seats or len(nodes) >= MANY_NODES)


def describe_cause(audit: AuditKind, step: int, ranks: Collection[int], units: Iterable[str], difference: str) -> str:
    """Return what makes the audit differ on ``ranks``, in words for the script's author."""
    names = join_names(list(dict.fromkeys(units)), MAX_UNITS)
    example = f" ({difference})" if difference else ""
    return (
        f"audit {audit} of step {step} differs on {ranks_named(ranks)}: {names}{example}. Hardware does not fail on so "
        f"many nodes at once, so the program is the cause, likely {LIKELY_CAUSES[audit]}. No node is accused, and "
        f"audit {audit} is off for the rest of this job"
    )


def describe_lone_rank(audit: AuditKind, sentence: str) -> str:
    """Return what a contradiction says in a job that has no other rank to compare with."""
    return (
        f"{sentence}. The job has no other rank, so either the program is the cause, likely {LIKELY_CAUSES[audit]}, or "
        f"the GPU: test it (`dcgmi diag -r 3`). Nothing is undone, and audit {audit} is off for the rest of this job"
    )


def describe_ties(audit: AuditKind, sentence: str, count: int) -> str:
    """Return what follows where two nodes differ again and again, and no third one decides."""
    return _describe_undecided(sentence, count, LIKELY_CAUSES[audit], f"audit {audit} is off")


def describe_vote_ties(sentence: str, count: int) -> str:
    """Return what follows where digests differ again and again without a majority."""
    return _describe_undecided(sentence, count, VOTE_CAUSES, "digests are not compared")


def _describe_undecided(sentence: str, count: int, causes: str, outcome: str) -> str:
    return (
        f"{sentence}; that is the {_ordinal(count)} difference without a culprit. Either the program is the cause, "
        f"likely {causes}, or one of these nodes: test their GPUs (`dcgmi diag -r 3`). No node is evicted, and "
        f"{outcome} for the rest of this job"
    )


def describe_scattered(version: str, ranks: Collection[int]) -> str:
    """Return what follows where so many replicas hold different parameters that no hardware is the cause."""
    return (
        f"{ranks_named(ranks)} hold different parameters at version {version}. Hardware does not fail on so many nodes "
        f"at once, so the program is the cause, likely {VOTE_CAUSES}. Compare `model.named_parameters()` between "
        "ranks. No node is accused, and digests are not compared for the rest of this job"
    )


def _ordinal(count: int) -> str:
    return f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(count, 'th') }"
