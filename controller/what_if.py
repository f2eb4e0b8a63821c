"""What another policy would have done with the recorded past: a journal decided again under it.

From the first decision that differs on, what is recorded happened in a world that went another way: read it so.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeVar

import msgspec

from controller.core.policy import CorePolicy
from controller.core.state import FleetState
from controller.journal import segments
from controller.replay import Step, replay
from everstep.errors import NotFound
from everstep.vocabulary import Decision, Verdict

T = TypeVar("T")


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy would have done with a stretch of the past. ``at`` of verdicts is when.

    ``evictions``: how many it would have carried out; those that operators ordered are left out everywhere. ``also``:
    those of nodes that were not evicted, or not as often; ``not_then``: evictions of nodes that it would have left in.
    ``events``: how many were decided again, from ``since`` on. ``gaps``: (from, to) of what is not recorded in between,
    since another controller led, this one was down, or its disk failed.
    """

    since: float | None
    events: int
    evictions: int
    also: tuple[Verdict, ...]
    not_then: tuple[str, ...]
    gaps: tuple[tuple[float, float], ...]


def what_if(journal: Path, policy: CorePolicy, since: float) -> WhatIf:
    """Decides everything in ``journal`` (a directory) from ``since`` on again under ``policy``.

    Raises NotFound where nothing was recorded since then, MalformedMessage as ``replay``.
    """
    reached = _reaching(segments(journal), since)
    if not reached:
        raise NotFound(f"nothing is recorded in {journal}: a journal is kept when journal_dir is set")
    tally = _Tally(since)
    state: FleetState | None = None
    for segment in reached:
        recording = replay(segment, policy, state)
        if not recording.follows:
            tally.gap(recording.begins_at)
        for step in recording.steps:
            tally.count(step)
        state = recording.state
    return tally.told()


class _Tally:
    def __init__(self, since: float) -> None:
        self._since = since
        self._began: float | None = None
        self._newest: float | None = None
        self._events = 0
        self._now: list[tuple[str, Verdict]] = []
        self._then: list[tuple[str, str]] = []
        self._gaps: list[tuple[float, float]] = []

    def gap(self, until: float) -> None:
        """What comes next does not follow what was counted."""
        if self._newest is not None and until > self._since:
            self._gaps.append((max(self._newest, self._since), until))

    def count(self, step: Step) -> None:
        self._newest = step.at
        if step.at < self._since:
            return
        self._began = step.at if self._began is None else self._began
        self._events += 1
        if not step.ordered:
            self._now += [(verdict.node, verdict) for verdict in step.verdicts if verdict.decision is Decision.EVICT]
            self._then += [(node, line) for line in step.then if (node := _evicted(line))]

    def told(self) -> WhatIf:
        now = Counter(node for node, _ in self._now)
        then = Counter(node for node, _ in self._then)
        more, fewer = now - then, then - now
        return WhatIf(
            since=self._began,
            events=self._events,
            evictions=len(self._now),
            also=_last(self._now, more),
            not_then=_last(self._then, fewer),
            gaps=tuple(self._gaps),
        )


def _last(found: list[tuple[str, T]], wanted: Counter[str]) -> tuple[T, ...]:
    """The newest ``wanted`` of each node, oldest first."""
    left = wanted.copy()
    kept: list[T] = []
    for node, one in reversed(found):
        if left[node] > 0:
            left[node] -= 1
            kept.append(one)
    return tuple(kept[::-1])


def _reaching(found: list[Path], since: float) -> list[Path]:
    """Segments with events after ``since``: all that begin later, and the one before them."""
    later = [path for path in found if int(path.name[:15]) / 1000 > since]
    return found[-len(later) - 1 :]


def _evicted(line: str) -> str:
    """The node that a line of ``describe`` evicts, empty for any other line."""
    if not line.startswith("verdict ") or f"({Decision.EVICT}): " not in line:
        return ""
    return line.split()[1].rpartition("-")[0]
