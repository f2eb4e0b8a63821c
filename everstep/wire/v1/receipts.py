"""Define the receipt of a job: what it did, what failed, and what that cost."""

from __future__ import annotations

from typing import Literal

from everstep.ids import GenerationNumber, JobId, NodeId, TraceId, Version
from everstep.vocabulary import Decision, GenerationReason
from everstep.wire.v1.base import Message
from everstep.wire.v1.operator_history import CheckpointCopy

RECEIPT_FORMAT = "everstep.receipt/1"

ReceiptResult = Literal["running", "finished", "failed", "interrupted"]


class ReceiptRecovery(Message, frozen=True, kw_only=True):
    """One recovery. Times are wall seconds of the controller.

    Attributes:
        duration_s: Seconds from the decision to the last rank's first step; None if not all ranks resumed.
        ranks: Number of ranks after it.
        phases_s: The slowest rank's seconds, by phase.
        repeated_steps: Finished steps that were computed again; None if the history of progress does not reach back.
        lost_s: Seconds lost, with those of repeated steps. Of a regroup at a boundary, only the seconds after it.
        restart_lost_s: Seconds that a restart from a checkpoint would have lost; 0 if ``is_failure`` is false.
        is_failure: A loss or an eviction. Growth, drains, placement and preemption are none, and neither is a regroup
            for an eviction that was rolled back.
        after_step: The boundary up to which ranks trained on after the decision; None if they stopped at once.
    """

    generation: GenerationNumber
    reason: GenerationReason
    sentence: str
    decided_at: float
    ranks: int
    trace: TraceId = ""
    duration_s: float | None = None
    restored: Version | None = None
    phases_s: dict[str, float] = {}
    repeated_steps: int | None = None
    lost_s: float = 0.0
    restart_lost_s: float = 0.0
    is_failure: bool = True
    after_step: int | None = None


class ReceiptEviction(Message, frozen=True, kw_only=True):
    """A node that left the job by a verdict. ``evidence`` is the message of the finding that ``rule`` judged."""

    node: NodeId
    decision: Decision
    at: float
    sentence: str
    rule: str = ""
    evidence: str = ""
    verdict: str = ""
    trace: TraceId = ""


class WorldSize(Message, frozen=True, kw_only=True):
    """Number of ranks from a generation on."""

    at: float
    generation: GenerationNumber
    ranks: int


class FailureCosts(Message, frozen=True, kw_only=True):
    """What regroups cost, and what restarts of the whole job would have cost instead of those after failures.

    A restart takes ``restart_s``, and repeats the work since the last multiple of ``checkpoint_interval_s``. Rank
    seconds are seconds times ranks; a rank has one GPU, if any.

    Attributes:
        stepping_s: Seconds since the first step, recoveries included.
        lost_s: Seconds lost to regroups, with those of repeated steps.
        effective_share: Share of ``stepping_s`` that was not lost; None before the first step.
    """

    checkpoint_interval_s: float
    restart_s: float
    stepping_s: float = 0.0
    lost_s: float = 0.0
    lost_rank_s: float = 0.0
    restart_lost_s: float = 0.0
    restart_lost_rank_s: float = 0.0
    effective_share: float | None = None

    @property
    def saved_rank_s(self) -> float:
        """Rank seconds saved against restarts; 0 if recoveries cost more."""
        return max(0.0, self.restart_lost_rank_s - self.lost_rank_s)


class JobReceipt(Message, frozen=True, kw_only=True):
    """A summary of a job, at its end or so far. Times are wall seconds of the controller.

    Attributes:
        format: Name and number of this format.
        sentence: Why the job is in its state.
        began_at: When the first launcher joined.
        ended_at: End of the job, or of this account of it.
        steps: The newest step that all ranks finished.
        until_step: The last step that the training function asked for; 0 if it is not known.
        step_s: Seconds per step of the slowest rank, at the end.
        loss: The loss reported last.
        gpus: Number of GPUs on the job's nodes. Without any, rank seconds are not GPU seconds.
        sizes: Each change of the number of ranks.
        recovery_count: Number of recoveries; ``recoveries`` has the newest of them, and of the other regroups.
        other_regroups: Number of regroups that followed from no failure.
        is_stopped: An operator ended the job; its ``result`` is ``failed``.
        evictions: Nodes that left by a verdict, oldest first.
        audit_notes: Suspicions that were withdrawn, differences of audits that only report, and audits that are off.
        versions: Versions that can be restored later.
        release: Release of Everstep.
    """

    format: str
    job: JobId
    result: ReceiptResult
    sentence: str
    began_at: float
    ended_at: float
    costs: FailureCosts
    steps: int = 0
    until_step: int = 0
    step_s: float = 0.0
    loss: float | None = None
    ranks: int = 0
    nodes: int = 0
    gpus: int = 0
    sizes: tuple[WorldSize, ...] = ()
    recovery_count: int = 0
    recoveries: tuple[ReceiptRecovery, ...] = ()
    evictions: tuple[ReceiptEviction, ...] = ()
    audit_notes: tuple[str, ...] = ()
    committed: Version | None = None
    verified: Version | None = None
    versions: tuple[CheckpointCopy, ...] = ()
    release: str = ""
    other_regroups: int = 0
    is_stopped: bool = False

    @property
    def outcome(self) -> str:
        """The result in a word for people: ``stopped`` if an operator ended the job."""
        return "stopped" if self.is_stopped else self.result

    @property
    def duration_s(self) -> float:
        """Seconds from the first launcher to the end."""
        return max(0.0, self.ended_at - self.began_at)
