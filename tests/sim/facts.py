"""What can be seen from outside: effects, writes, deliveries, answers, what trainers did. Checkers see only these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep_controller.core.effects import Effect
from everstep_controller.core.events import Event
from everstep_controller.store.rows import Batch

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec
from tests.sim.training_state import TrainingState


class Violation(AssertionError):
    """A promise was broken. ``checker`` names who saw it."""

    def __init__(self, checker: str, sentence: str) -> None:
        super().__init__(f"{checker}: {sentence}")
        self.checker = checker


@dataclass(frozen=True, slots=True)
class Handled:
    """A controller's core has handled an event. ``at`` is in its own time."""

    controller: str
    epoch: int
    event: Event
    effects: list[Effect]
    at: float


class Decided(Handled):
    """The same of the one that began last: what another one decides, whose time is over, can never be written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Durable:
    """A batch was applied to the database."""

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class TookOver:
    """A controller begins from what the database holds. ``marks``: newest report taken by (node, life)."""

    controller: str
    epoch: int
    marks: dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An agent was told that its reports up to ``through`` are durable."""

    node: str
    life: int
    through: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Seals that an agent reports no more: their generation is over."""

    node: str
    life: int
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Delivered:
    """A directive reached an agent, which had not had it before. ``life``: the agent's."""

    node: str
    life: int
    seq: int
    body: Any


@dataclass(frozen=True, slots=True)
class Entered:
    """A process takes part in a generation. ``life``: the process, never the same twice."""

    life: int
    node: str
    spec: GenerationSpec
    rank: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A process has finished an optimizer step: its state is ``state`` now."""

    life: int
    node: str
    job: str
    generation: int
    rank: int
    step: int
    state: TrainingState


@dataclass(frozen=True, slots=True)
class Restored:
    """The ranks of a generation agreed on what to start from (None: from scratch). ``torn``: its shares differ.
    ``storage``: from which checkpoint there, of which there is no version in memory."""

    spec: GenerationSpec
    version: Version | None
    state: TrainingState
    torn: bool
    storage: str = ""


@dataclass(frozen=True, slots=True)
class Unrestorable:
    """The ranks of a generation found nothing that they may start from."""

    spec: GenerationSpec
    sentence: str


@dataclass(frozen=True, slots=True)
class StoredWhole:
    """A vault has written a version's ``.metadata``, or found it. ``removed``: folders that went, ``left``: versions
    that can be loaded now."""

    job: str
    version: Version
    removed: tuple[str, ...]
    left: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class StorageBare:
    """A generation was told of a checkpoint that is not on storage, or not whole."""

    spec: GenerationSpec


@dataclass(frozen=True, slots=True)
class ParityMade:
    """A vault has made P or Q. ``members``: the same for both where they are of the same shards."""

    job: str
    node: str
    version: Version
    group: int
    letter: str
    members: str


@dataclass(frozen=True, slots=True)
class MemoryLost:
    """A machine lost what was in its memory, checkpoints included."""

    node: str


@dataclass(frozen=True, slots=True)
class FaultBegan:
    """Something was broken on purpose. ``node`` is empty where it concerns no machine."""

    kind: str
    node: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """A machine has carried a probe out."""

    node: str
    probe: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator's order was accepted."""

    action: str
    node: str
    job: str


@dataclass(frozen=True, slots=True)
class Cordoned:
    """Somebody else has taken a node out of the scheduler's service; ``by`` is empty where it was given back."""

    node: str
    by: str


@dataclass(frozen=True, slots=True)
class RemedyAsked:
    """A controller's order for a remedy has reached the outside."""

    controller: str
    epoch: int
    remedy: str
    node: str
    kind: str


@dataclass(frozen=True, slots=True)
class RemedyLookedAt:
    """A controller has read back whether a remedy is done."""

    controller: str
    epoch: int
    remedy: str
    done: bool


@dataclass(frozen=True, slots=True)
class RemedyCarriedOut:
    """The outside has done something to a node."""

    remedy: str
    node: str
    kind: str


Fact = (
    Handled
    | Decided
    | Durable
    | TookOver
    | Acknowledged
    | LeftOut
    | Delivered
    | Entered
    | Stepped
    | Restored
    | Unrestorable
    | StoredWhole
    | StorageBare
    | ParityMade
    | MemoryLost
    | FaultBegan
    | ProbeAnswered
    | Ordered
    | Cordoned
    | RemedyAsked
    | RemedyLookedAt
    | RemedyCarriedOut
)
