"""Observations of a world from outside: decisions, writes, deliveries, steps. Checkers see nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.effects import Effect
from everstep_controller.core.events import Event
from everstep_controller.store.rows import Batch
from tests.sim.cluster.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class EventHandled:
    """A controller's core has handled an event. ``at`` is the time on the controller's own clock."""

    controller: str
    epoch: int
    event: Event
    effects: list[Effect]
    at: float


class LeaderDecided(EventHandled):
    """The newest leader's core has handled an event. Decisions of earlier leaders can no longer be written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """A batch was applied to the database."""

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class LeaderStarted:
    """A controller leads from the stored state.

    ``acknowledged_reports``: number of the newest stored report, by node and incarnation of its agent.
    """

    controller: str
    epoch: int
    acknowledged_reports: dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class ReportsAcknowledged:
    """A controller has confirmed to an agent that its reports up to number ``through`` are durable."""

    node: str
    incarnation: int
    through: int


@dataclass(frozen=True, slots=True)
class SealsDropped:
    """An agent has dropped seals from its reports, by their ``numbers``, because their generation is over."""

    node: str
    incarnation: int
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DirectiveDelivered:
    """A directive has reached an agent for the first time."""

    node: str
    incarnation: int
    seq: int
    body: Any


@dataclass(frozen=True, slots=True)
class ProbeCompleted:
    """A machine has completed its part of a probe."""

    node: str
    probe: str
    ok: bool


@dataclass(frozen=True, slots=True)
class GenerationEntered:
    """A rank's process takes part in a generation. ``pid`` is unique in the world."""

    pid: int
    node: str
    spec: GenerationSpec
    rank: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A rank's process has finished an optimizer step, with ``state`` as the result."""

    pid: int
    node: str
    job: str
    generation: int
    rank: int
    step: int
    state: TrainingState


@dataclass(frozen=True, slots=True)
class StateRestored:
    """The ranks of a generation have restored the state from which they start.

    Attributes:
        version: The restored version; None if the state comes from storage or is the initial one.
        shares_differ: Whether the ranks' shares belong to different states.
        storage: URL of the restored checkpoint, empty if there is none.
    """

    spec: GenerationSpec
    version: Version | None
    state: TrainingState
    shares_differ: bool
    storage: str = ""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The ranks of a generation found no version that they may restore."""

    spec: GenerationSpec
    sentence: str


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """A vault has written a checkpoint's ``.metadata``, or found it.

    ``removed``: folders that retention deleted. ``remaining``: versions that can be loaded now.
    """

    job: str
    version: Version
    removed: tuple[str, ...]
    remaining: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class CheckpointMissing:
    """A generation names a checkpoint that is missing on storage or incomplete."""

    spec: GenerationSpec


@dataclass(frozen=True, slots=True)
class ParityMade:
    """A vault has made P or Q. ``members_digest`` is equal if P and Q come from the same shards."""

    job: str
    node: str
    version: Version
    group: int
    letter: str
    members_digest: str


@dataclass(frozen=True, slots=True)
class MemoryLost:
    """A machine has lost the content of its memory, checkpoints included."""

    node: str


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault was injected. ``node`` is empty if the fault concerns no single machine."""

    kind: str
    node: str


@dataclass(frozen=True, slots=True)
class CommandAccepted:
    """The leader has accepted an operator's command."""

    action: str
    node: str
    job: str


@dataclass(frozen=True, slots=True)
class CordonChanged:
    """Another owner has cordoned or uncordoned a node in the scheduler. ``by`` is empty after an uncordon."""

    node: str
    by: str


@dataclass(frozen=True, slots=True)
class RemediationRequested:
    """A controller's request for a remediation has reached the scheduler."""

    controller: str
    epoch: int
    remediation: str
    node: str
    kind: str


@dataclass(frozen=True, slots=True)
class RemediationReadBack:
    """A controller has read back whether a remediation is done."""

    controller: str
    epoch: int
    remediation: str
    done: bool


@dataclass(frozen=True, slots=True)
class RemediationPerformed:
    """The scheduler has performed a remediation of a node."""

    remediation: str
    node: str
    kind: str


Observation = (
    EventHandled
    | LeaderDecided
    | BatchWritten
    | LeaderStarted
    | ReportsAcknowledged
    | SealsDropped
    | DirectiveDelivered
    | ProbeCompleted
    | GenerationEntered
    | StepFinished
    | StateRestored
    | RestoreFailed
    | CheckpointCompleted
    | CheckpointMissing
    | ParityMade
    | MemoryLost
    | FaultInjected
    | CommandAccepted
    | CordonChanged
    | RemediationRequested
    | RemediationReadBack
    | RemediationPerformed
)
