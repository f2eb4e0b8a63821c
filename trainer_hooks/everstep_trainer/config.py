"""Every knob of the training side, with its unit, its reason and its default."""

from __future__ import annotations

import msgspec

from everstep.clock import Backoff
from everstep.errors import ConfigurationError

BACKENDS = ("auto", "gloo", "nccl")


class HookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank behaves between its training function and its node's agent.

    Durations are seconds. The defaults suit one machine as well as a fleet: nothing here has to be tuned for a
    regrouping to be fast, since survivors leave on the agent's word and not on a time-out.
    """

    backend: str = "auto"
    """Collectives: ``gloo`` on CPUs, ``nccl`` on CUDA devices; ``auto`` takes NCCL where a CUDA device is."""

    join_timeout_s: float = 30.0
    """Longest wait for the other members of a new generation. A newer generation ends the wait at once, so this only
    bounds the case that nobody has noticed a missing member. Too short: a slow starter costs everybody a round."""

    collective_timeout_s: float = 600.0
    """torch's own time-out of a collective: the last resort where neither agent nor watchdog can act."""

    explanation_grace_s: float = 0.25
    """How long an exception of the training function is held back for a newer generation to explain it: a lost peer
    can show as any error. About ten times the way from a death to the directive; a user's error is late by it."""

    regroup_wait_s: float = 30.0
    """How long a failed collective waits for the generation that replaces its own. Past it the rank says once more that
    it failed, and goes on waiting: the controller may be away, or be another by now."""

    max_unattributed_failures: int = 8
    """Generations in a row in which a rank's collectives may fail at the same step, though the group had come about and
    nobody is lost: after so many the error is the training function's, and ends the job with its traceback. The waits
    between them add up to some 20 s; fewer end a job for a network that was away for a moment."""

    job_decision_wait_s: float = 60.0
    """How long a rank that reported an error, or that finished, waits to hear what becomes of the job."""

    agent_connect_timeout_s: float = 60.0
    """How long a rank tries to reach its agent at start before it gives up."""

    min_hang_threshold_s: float = 1.0
    """Smallest threshold of the watchdog where the job gives none: below it, a busy machine looks like a hang."""

    hang_factor: float = 20.0
    """The watchdog's threshold as a multiple of the rank's own median step. Larger: slower to find a hang. Smaller:
    an evaluation or a checkpoint inside a step is taken for one, once: the watchdog learns how long it takes."""

    hang_warmup_steps: int = 3
    """Steps of a generation before its median is believed."""

    first_step_allowance_s: float = 120.0
    """Threshold until the median is believed: building, restoring, compiling and the first steps happen in it."""

    step_window: int = 20
    """Steps that the median is taken over: long enough to ride out one slow step, short enough to follow a change."""

    abort_interval_s: float = 0.01
    """How often sockets are shut again while the main thread has not left a generation that is over: groups open
    connections lazily, and a join opens new ones."""

    interrupt_after_s: float = 0.2
    """How long a main thread that is asked to leave may take to come to a module call, a collective, an optimizer
    step or the end of its step, before its Python code is interrupted wherever it is. Sooner gains little: a training
    step passes many such places."""

    leave_timeout_s: float = 2.0
    """How long a main thread may take to leave a generation that is over, before its process is ended so that the
    launcher replaces it. Nearly always it takes milliseconds; a wait in foreign C++ code cannot be interrupted."""

    outbox_frames: int = 1024
    """Messages kept while the agent is away; the oldest are dropped. 1024 seals are minutes of training."""

    max_stack_bytes: int = 60_000
    """Bound on the stacks that a stalled rank sends; the wire allows 65,536 characters."""

    reconnect: Backoff = Backoff(floor_s=0.02, ceiling_s=1.0)
    """Pauses between attempts to reach the agent. An agent restarts in well under a second."""

    def validate(self) -> HookSettings:
        """Returns itself. Raises ConfigurationError for settings that contradict each other."""
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        self._require_positive()
        if self.hang_factor <= 1:
            raise ConfigurationError(f"hang_factor {self.hang_factor} would call an ordinary step a hang: take over 1")
        if self.first_step_allowance_s < self.min_hang_threshold_s:
            raise ConfigurationError(
                f"first_step_allowance_s ({self.first_step_allowance_s}) must not be below min_hang_threshold_s "
                f"({self.min_hang_threshold_s}): the first step is the slowest"
            )
        if self.interrupt_after_s >= self.leave_timeout_s:
            raise ConfigurationError(
                f"interrupt_after_s ({self.interrupt_after_s}) must be below leave_timeout_s ({self.leave_timeout_s}): "
                "a process is replaced only when interrupting it did not help"
            )
        if self.explanation_grace_s >= self.regroup_wait_s:
            raise ConfigurationError(
                f"explanation_grace_s ({self.explanation_grace_s}) must be below regroup_wait_s ({self.regroup_wait_s})"
            )
        return self

    def _require_positive(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigurationError(f"{name} must be positive, not {value}")
