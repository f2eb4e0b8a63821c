"""Settings of the training side, each with its unit, reason and default."""

from __future__ import annotations

import msgspec

from everstep.clock import Backoff
from everstep.errors import ConfigurationError

BACKENDS = ("auto", "gloo", "nccl")


class HookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a rank between its training function and its node's agent.

    Durations are seconds. The defaults suit one machine as well as a fleet. Fast regrouping needs no tuning, since
    survivors leave a generation on the agent's message and not on a time-out.

    Example::

        everstep.main(train, settings=everstep.HookSettings(hang_factor=40.0))
    """

    backend: str = "auto"
    """Backend of collectives: ``gloo`` for CPUs, ``nccl`` for CUDA devices, ``auto`` for NCCL if there is a CUDA
    device."""

    join_timeout_s: float = 30.0
    """Longest wait for the other members of a new generation. A newer generation ends the wait at once, so this bounds
    only the case of a missing member that was not noticed. Too short: one slow starter costs all another attempt.
    """

    collective_timeout_s: float = 600.0
    """torch's own time-out of a collective: the last resort if neither agent nor watchdog can act."""

    error_attribution_grace_s: float = 0.25
    """Seconds that an exception of the training function is held back until a newer generation may explain it, since a
    lost peer can show as any error. About ten times the delay from a death to the directive; it delays the report of a
    user's error."""

    regroup_wait_s: float = 30.0
    """Seconds that a failed collective waits for the next generation before the rank reports the failure again. The
    rank then goes on waiting: the controller may be away or may have been replaced."""

    max_unattributed_failures: int = 8
    """Generations in a row in which a rank's collectives may fail at the same step although its group formed and no
    rank is lost. At this number the error counts as the training function's and ends the job with its traceback. The
    waits in between add up to about 20 s; a smaller number ends a job because of a short network outage."""

    job_decision_timeout_s: float = 60.0
    """Seconds that a rank waits, after it reported an error or finished, for the decision about the job."""

    agent_connect_timeout_s: float = 60.0
    """Seconds that a rank tries to reach its agent at start."""

    stall_report_s: float = 1.0
    """Seconds without progress after which a rank tells the controller what it does; twice the median step if that is
    longer. Nothing is decided by the report alone."""

    min_hang_threshold_s: float = 1.0
    """Smallest threshold of the watchdog unless the job sets one. The controller waits for a minute in any case
    (``stalls.hang_floor_s`` of the policy)."""

    hang_factor: float = 20.0
    """Seconds of standing still from which a rank counts as hung, as a multiple of its own median step. A rank that
    works does not count as hung. Larger: hangs are found later."""

    hang_warmup_steps: int = 3
    """Steps of a generation before the watchdog uses its median."""

    first_step_allowance_s: float = 120.0
    """The watchdog's threshold during these first steps, which include building, restoring and compiling."""

    busy_loop_s: float = 5.0
    """Seconds for which the main thread repeats one loop without a call, in which no variable changes, until that
    counts as a busy loop. Smaller: waits for another thread that takes long look like it."""

    step_window: int = 20
    """Number of steps in the median: long enough to ride out one slow step, short enough to follow a change."""

    abort_interval_s: float = 0.01
    """Interval at which sockets are shut again until the main thread has left an ended generation: groups open
    connections lazily, and joining opens new ones."""

    interrupt_after_s: float = 0.2
    """Seconds that a main thread that was asked to leave may take to reach a module call, a collective, an optimizer
    step or the end of its step, before its Python code is interrupted anywhere. A shorter time gains little: a training
    step passes many such points."""

    leave_timeout_s: float = 2.0
    """Seconds that a main thread may take to leave an ended generation before its process exits and the launcher
    replaces it. Leaving nearly always takes milliseconds; a wait in foreign C++ code cannot be interrupted."""

    outbox_frames: int = 1024
    """Messages kept while the agent is away; the oldest are dropped. 1024 seals are minutes of training."""

    max_stack_bytes: int = 60_000
    """Largest size of the stacks that a stalled rank sends; the wire allows 65,536 characters."""

    reconnect: Backoff = Backoff(floor_s=0.02, ceiling_s=1.0)
    """Pauses between attempts to reach the agent. An agent restarts in well under a second."""

    def validate(self) -> HookSettings:
        """Return these settings if they are consistent.

        Raises:
            ConfigurationError: Settings contradict each other.
        """
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigurationError(f"{name} must be positive, not {value}")
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
        if self.error_attribution_grace_s >= self.regroup_wait_s:
            raise ConfigurationError(
                f"error_attribution_grace_s ({self.error_attribution_grace_s}) must be below regroup_wait_s "
                f"({self.regroup_wait_s})"
            )
        return self
