"""Combine trials of a policy change on the past, from the journals of one or several controllers.

Each controller writes a journal while it leads, and one leads at a time: together the journals are the fleet's past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

import msgspec

from everstep.errors import EverstepError, NotFound
from everstep.wire.v1.operator_history import PolicyTrialResult, RecordedSpan

T = TypeVar("T")

FAILOVER_S = 60.0
"""Longest time, in seconds, between a leader's last event and the next leader's first one that counts as no gap: a
journal is written only when something happens."""


def recording_gaps(spans: Iterable[RecordedSpan]) -> tuple[tuple[float, float], ...]:
    """Return the gaps (from, to) between recorded spans, oldest first, without those in which no other controller
    can have led."""
    return tuple(
        (before.ends_at, after.begins_at)
        for before, after in pairwise(sorted(spans, key=lambda one: one.begins_at))
        if after.begins_at - before.ends_at > (FAILOVER_S if after.epoch == before.epoch + 1 else 0.0)
    )


def newest_per_node(found: Iterable[tuple[str, T]], counts: Counter[str]) -> tuple[T, ...]:
    """Return the newest items of each node, up to ``counts``, from (node, item) given oldest first; in that order."""
    left = counts.copy()
    kept: list[T] = []
    for node, item in reversed(list(found)):
        if left[node] > 0:
            left[node] -= 1
            kept.append(item)
    return tuple(kept[::-1])


def evicted_node(line: str) -> str:
    """Return the node that a verdict evicts, from its journal line ``verdict NODE-NUMBER (evict): ...``."""
    return line.split()[1].rpartition("-")[0]


def describe_result(result: PolicyTrialResult) -> str:
    """Return the result in a sentence."""
    also, not_then = len(result.added_evictions), len(result.avoided_evictions)
    nodes = ", ".join(verdict.node for verdict in result.added_evictions[:20])
    sentence = f"it would have evicted {'once' if result.evictions == 1 else f'{result.evictions} times'}"
    sentence += f"; also {nodes}" if also else ""
    sentence += f"; {not_then} {'eviction' if not_then == 1 else 'evictions'} would not have been" if not_then else ""
    sentence = sentence if also or not_then else f"{sentence}, as happened"
    if result.gaps:
        hours = sum(end - begin for begin, end in result.gaps) / 3600.0
        sentence += f"; {hours:.1f} h of the time are not recorded here ({len(result.gaps)} gaps)"
    return sentence


def merge_results(answers: Mapping[str, PolicyTrialResult | EverstepError]) -> PolicyTrialResult:
    """Merge the results of several controllers, by address, and name failed answers.

    A controller that never led has no result. A journal that two answers cover (one directory, or two addresses of one
    controller) counts once. Raises the first error if there is no result.
    """
    parts = _distinct([said for said in answers.values() if isinstance(said, PolicyTrialResult)])
    silent = {url: said for url, said in answers.items() if isinstance(said, EverstepError)}
    if not parts:
        raise next((said for said in silent.values() if not isinstance(said, NotFound)), next(iter(silent.values())))
    told = _summed(parts)
    failed = {url: said for url, said in silent.items() if not isinstance(said, NotFound)}
    missing = "".join(f"; {url} is not counted: {said}" for url, said in failed.items())
    return msgspec.structs.replace(told, sentence=describe_result(told) + missing)


def _distinct(parts: Iterable[PolicyTrialResult]) -> list[PolicyTrialResult]:
    """Return the results without those that add no leadership: each belongs to one controller."""
    kept: list[PolicyTrialResult] = []
    counted: set[int] = set()
    for part in parts:
        epochs = {span.epoch for span in part.spans}
        if not kept or not epochs <= counted:
            kept.append(part)
            counted |= epochs
    return kept


def _summed(parts: list[PolicyTrialResult]) -> PolicyTrialResult:
    parts = sorted(parts, key=lambda part: part.since)
    also = sorted((verdict for part in parts for verdict in part.added_evictions), key=lambda verdict: verdict.at)
    now = [(verdict.node, verdict) for verdict in also]
    then = [(evicted_node(line), line) for part in parts for line in part.avoided_evictions]
    more, fewer = (Counter(node for node, _ in found) for found in (now, then))
    stretches = tuple(sorted((span for part in parts for span in part.spans), key=lambda one: one.begins_at))
    return PolicyTrialResult(
        since=min((part.since for part in parts if part.since), default=0.0),
        events=sum(part.events for part in parts),
        evictions=sum(part.evictions for part in parts),
        added_evictions=newest_per_node(now, more - fewer),
        avoided_evictions=newest_per_node(then, fewer - more),
        gaps=recording_gaps(stretches),
        spans=stretches,
    )
