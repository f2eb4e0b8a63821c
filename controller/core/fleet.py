"""The door of the decision core: one event in, a list of effects out."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.effects import Effect
from controller.core.events import Event
from controller.core.policy import CorePolicy
from controller.core.state import FleetRecord, FleetState, JobRecord, NodeRecord, VersionRecord
from everstep.wire.v1.training import RankProgress


def handle(state: FleetState, event: Event, now: float) -> list[Effect]:
    """Applies ``event``: changes ``state`` and returns what is to be done, in order. Deterministic.

    ``now``: seconds since the epoch that neither jump nor go back (the shell's wall clock at its start, plus
    monotonic time since).

    Raises NotFound (unknown node or job), StaleGeneration (an earlier life of the node) or Conflict (an operator's
    order that cannot be carried out now), always before anything was changed.
    """
    raise NotImplementedError


def touch(state: FleetState, node: str, incarnation: int, now: float, ranks: tuple[RankProgress, ...] = ()) -> bool:
    """Takes a heartbeat that says nothing new. O(1), no effects.

    False when the node, this life of it, or its findings are unknown here: answer with ``resend``. What a beat ends
    (a suspicion, a probation) is done by the next Tick: read ``next_deadline`` again after a touch.
    """
    raise NotImplementedError


def next_deadline(state: FleetState) -> float | None:
    """When to send the next Tick, in ``now``'s terms; in the past: at once. None: nothing to wait for."""
    raise NotImplementedError


def restore(
    policy: CorePolicy,
    fleet: FleetRecord | None,
    nodes: Iterable[NodeRecord],
    jobs: Iterable[JobRecord],
    versions: Iterable[VersionRecord],
) -> FleetState:
    """The state as it was stored; with nothing stored, a new one. Send ``ControllerStarted`` first.

    ``versions``: at least each job's newest committed and newest verified one; more do no harm.
    """
    raise NotImplementedError


def check_invariants(state: FleetState) -> None:
    """Raises AssertionError, naming the invariant of docs/guarantees.md that does not hold."""
    raise NotImplementedError
