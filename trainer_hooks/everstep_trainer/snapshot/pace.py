"""Choose the number of steps between snapshots, so that the hooks take only a small share of training's time.

Each rank measures what a snapshot costs and how long a step is. Where cores are idle, a snapshot costs the time for
which it blocks training (StepStopwatch). Where training waits for cores (CoreContention), it costs the CPU time of both
threads instead: every millisecond that a copy computes is taken from some rank, and a wait for a core is not lost. The
CPU time that the hooks take in each step, with or without a snapshot, counts there too: snapshots get what it leaves.

All ranks take the pace of the slowest from the same step on, without a collective: steps are counted in windows of
PACE_WINDOW. In a window's first quarter each rank publishes the pace that it needed in the window before. In the second
quarter rank 0 decides for the next window; from the third on all ranks read the decision. Ranks run in lock step and do
their part before the next snapshot, at most MAX_INTERVAL steps later, so readers find the decision written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import thread_time
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.base.progress import timed_event

# ---- stopwatch: duration of steps, and how long snapshots block training in them
#
# On a GPU the training stream's time counts: a thread ahead of the stream delays nothing while it waits. There a time
# point is an event. The time between one event before a wait and one after it is how long the stream stood still,
# whether the thread or the stream itself waited. Nothing waits for the events; they are read a step or more later.

TimePoint = Any  # seconds, or a torch.cuda.Event of each GPU; their methods carry no types


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of one step.

    Attributes:
        step_s: Duration without what snapshots blocked.
        blocked_s: How long snapshots blocked it; None if no snapshot began in it.
        cpu_s: CPU time of the training thread in these blocks.
    """

    step_s: float
    blocked_s: float | None = None
    cpu_s: float = 0.0


OnStep = Callable[[StepTimes], None]


class _Step(msgspec.Struct):
    """One step, from the end of the previous one to its own; ``has_snapshot``: a snapshot began in it."""

    began: TimePoint
    ended: TimePoint = None
    has_snapshot: bool = False
    blocked: list[tuple[TimePoint, TimePoint]] = []
    cpu_s: float = 0.0


@dataclass(eq=False)
class StepStopwatch:
    """Times one training thread's steps. ``on_step`` is called with each of them."""

    _on_step: OnStep | None
    _clock: Clock

    def __post_init__(self) -> None:
        self._gpus: Sequence[torch.device] = ()
        self._step: _Step | None = None
        self._over: deque[_Step] = deque()

    def end_step(self, gpus: Sequence[torch.device]) -> None:
        """Record that a step is finished, by a GPU when it gets there. ``gpus``: those of the state, if any."""
        if self._on_step is None:
            return
        if gpus != self._gpus:
            self._gpus, self._step = gpus, None
            self._over.clear()
        now = self._now()
        if self._step is not None:
            self._step.ended = now
            self._over.append(self._step)
        self._step = _Step(now)
        while self._over and (not gpus or all(event.query() for event in self._over[0].ended)):
            step = self._over.popleft()
            blocked_s = sum(self._seconds_between(*pair) for pair in step.blocked)
            step_s = max(0.0, self._seconds_between(step.began, step.ended) - blocked_s)
            self._on_step(StepTimes(step_s, blocked_s if step.has_snapshot else None, step.cpu_s))

    def _now(self) -> TimePoint:
        """Return a time point between the work so far, of this thread or of the GPUs' streams, and later work."""
        if not self._gpus:
            return self._clock.monotonic()
        return [torch.cuda.current_stream(gpu).record_event(timed_event()) for gpu in self._gpus]

    def _seconds_between(self, first: TimePoint, last: TimePoint) -> float:
        """Return the seconds between two time points that have passed; of several streams, the slowest's."""
        if not self._gpus:
            return float(last - first)
        return max(float(before.elapsed_time(after)) for before, after in zip(first, last, strict=True)) / 1000.0

    @contextmanager
    def blocked(self, *, has_snapshot: bool = False) -> Iterator[None]:
        """Measure a wait of training, or an order to wait. ``has_snapshot``: a snapshot begins in it."""
        step = self._step
        if step is None:
            yield
            return
        began, cpu_s = self._now(), thread_time()
        yield
        step.cpu_s += thread_time() - cpu_s
        step.blocked.append((began, self._now()))
        step.has_snapshot = step.has_snapshot or has_snapshot


# ---- pace

log = logging.getLogger(__name__)

DEFAULT_BUDGET = 0.02
"""Share of training's time that snapshots may take before they become less frequent; on full cores, that snapshots and
all other work of the hooks may take."""
MIN_SNAPSHOT_SHARE = 0.001
"""Share that snapshots get where the hooks' other work takes the whole budget."""
MAX_BLOCKED_SHARE = 0.1
"""Largest share of training's time that snapshots may block even where cores are full. There a block is mostly a wait
for a core that others use, which the budget does not count; but it may also be a wait for a network."""
MIN_BLOCKED_S = 0.02
"""Shorter blocks are waits for a core."""
RELAX_FACTOR = 0.8
"""Factor of a share below which snapshots become more frequent again, so that the pace does not alternate."""
MIN_STEP_S = 1e-6
PACE_WINDOW = 64
MAX_INTERVAL = 8
"""Most steps between snapshots. A quarter of a window is twice as long."""


def target_interval(cost_s: float, step_s: float, current: int, share: float) -> int:
    """Return the steps between snapshots that keep their cost within a share of training's time.

    Args:
        cost_s: Seconds that one snapshot costs.
        step_s: Seconds of a step without them.
        current: The present number, which is kept while fewer steps would only just suffice.
        share: The share of all time, between 0 and 1.
    """

    def apart(share: float) -> int:
        return max(1, ceil(min(MAX_INTERVAL, cost_s * (1 - share) / (share * max(step_s, MIN_STEP_S)))))

    needed = apart(share)
    return needed if needed >= current else min(current, apart(share * RELAX_FACTOR))


class SnapshotPace:
    """The pace of one rank in one generation; a ``fixed_interval`` measures nothing. ``budget``: the share of
    training's time that snapshots may take. ``contention``: None if cores are never full."""

    def __init__(
        self,
        store: Store,
        rank: int,
        fixed_interval: int | None,
        budget: float = DEFAULT_BUDGET,
        contention: CoreContention | None = None,
    ) -> None:
        self._store, self._rank, self.fixed_interval = store, rank, fixed_interval
        self._budget, self._contention = budget, contention
        self._paces = [(0, 1)]  # (first window, interval): the last two decisions
        self._wanted_intervals: dict[int, int] = {}
        self._steps: list[StepTimes] = []
        self._hooks_s = 0.0  # CPU time in the running step
        self._beside_s: list[float] = []  # CPU time of the hooks in each step beside snapshots
        self._copies: list[float] = []
        self._window = 0
        self._done: set[tuple[str, int]] = set()
        self._has_warned = False
        self.are_cores_full = False
        """Whether training waited for cores in the last window."""

    def interval_at(self, step: int) -> int:
        """Return the number of steps between regular snapshots at ``step``."""
        if self.fixed_interval is not None:
            return self.fixed_interval
        return next(every for window, every in reversed(self._paces) if window <= step // PACE_WINDOW)

    def is_due(self, step: int) -> bool:
        """Return whether every rank stores this step; the same on all of them."""
        return step % self.interval_at(step) == 0

    # --- for the training thread

    def end_step(self, step: int) -> None:
        """Record that ``step`` is finished, before its snapshot begins."""
        if step // PACE_WINDOW == self._window:
            return
        self._window = step // PACE_WINDOW
        self.are_cores_full = self._contention is not None and self._contention.is_crowded()
        if self.fixed_interval is None:
            wanted = self._wanted_interval(self.interval_at(step))
            self._wanted_intervals = {} if wanted is None else {self._window: wanted}

    def _wanted_interval(self, current: int) -> int | None:
        """Return what the steps of the last window call for, and forget them; None if none had a snapshot."""
        steps, self._steps = self._steps, []
        copies, self._copies = self._copies, []
        beside, self._beside_s = self._beside_s, []
        stored = [each for each in steps if each.blocked_s is not None]
        if not stored:
            return None
        step_s, blocked_s = median(each.step_s for each in steps), median(each.blocked_s or 0.0 for each in stored)
        if not self.are_cores_full or self._contention is None:
            return target_interval(blocked_s, step_s, current, self._budget)
        cpu_s = median(each.cpu_s for each in stored) + (median(copies) if copies else 0.0)
        taken = median(beside) * self._contention.ranks_per_core / max(step_s, MIN_STEP_S)
        share = max(MIN_SNAPSHOT_SHARE, self._budget - taken)
        wanted = target_interval(cpu_s * self._contention.ranks_per_core, step_s, current, share)
        if blocked_s >= MIN_BLOCKED_S:
            wanted = max(wanted, target_interval(blocked_s, step_s, current, max(MAX_BLOCKED_SHARE, self._budget)))
        return wanted

    def record_step(self, times: StepTimes) -> None:
        """Record a finished step."""
        self._steps.append(times)
        hooks_s, self._hooks_s = self._hooks_s, 0.0
        self._beside_s.append(max(0.0, hooks_s - times.cpu_s))

    def record_hook_cpu(self, cpu_s: float) -> None:
        """Record CPU time of the hooks in the running step, that of snapshots on this thread included."""
        self._hooks_s += cpu_s

    # --- for the copier thread

    def record_copy(self, cpu_s: float) -> None:
        """Record the CPU time that the copier spent on one snapshot."""
        if self.fixed_interval is None:
            self._copies.append(cpu_s)

    def agree(self, step: int) -> None:
        """Take part in the agreement after each snapshot, before the next one. Raises what the store raises."""
        if self.fixed_interval is not None:
            return
        window, at = divmod(step, PACE_WINDOW)
        quarter = 4 * at // PACE_WINDOW
        decision = f"pace/{window + 1}"
        if quarter == 0 and self._first("wish", window) and (wish := self._wanted_intervals.get(window, 1)) > 1:
            self._store.add(f"pace/{window}/wish/{wish}", 1)
        if quarter == 1 and self._rank == 0 and self._first("decide", window):
            wishes = (n for n in range(2, MAX_INTERVAL + 1) if self._store.check([f"pace/{window}/wish/{n}"]))
            self._store.set(decision, str(max(wishes, default=1)))
        if quarter >= 2 and self._first("take", window) and self._store.check([decision]):
            self._take(window + 1, int(self._store.get(decision)))

    def _first(self, kind: str, window: int) -> bool:
        known = (kind, window) in self._done
        self._done = {done for done in self._done if done[1] >= window} | {(kind, window)}
        return not known

    def _take(self, window: int, every: int) -> None:
        before = self.interval_at((window - 1) * PACE_WINDOW)
        self._paces = [(0, before), (window, every)]
        if self._rank != 0 or every == before:
            return
        begin = window * PACE_WINDOW
        if every == 1:
            log.info("a snapshot of each step again, from step %d", begin)
        elif self._has_warned:
            log.info("a snapshot every %d steps, from step %d", every, begin)
        else:
            self._has_warned = True
            log.warning(
                "a snapshot every %d steps from step %d: with one of each step, snapshots and the other work of the "
                "hooks would take over %.3g %% of the time. The loss of a node, or of a rank during an update, may "
                "then repeat up to %d finished steps; "
                "run.track(snapshot_every=1) stores each step, "
                "snapshot_budget= is the share of the time",
                every,
                begin,
                100 * self._budget,
                every - 1,
            )
