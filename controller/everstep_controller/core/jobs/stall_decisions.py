"""Decide what follows from ranks that make no progress: plain data in, a decision with its sentence out.

The ranks that stand at the smallest (step, collectives) are those for which the others wait. What they do decides:

* One of them works: nothing is done before its work limit. The wait is said after some seconds.
* They stand still, or run a loop in which nothing changes: they are replaced after the hang floor.
* All ranks wait in collectives, so no single rank is at fault: they regroup after the hang floor. If they wait in
  different collectives, the script is named, and the job fails when that comes back at the same step.
* Other ranks have returned, and the rest waits for them in a collective of all ranks: the job fails. If the rest waits
  in other groups or for messages, that is said after some seconds, and the job fails after the hang floor.

A rank that waits in a collective is never replaced for waiting, and neither is one that says nothing: its agent reports
it if its process is stopped or stands still.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from everstep.ids import Rank
from everstep.vocabulary import RankActivity
from everstep.wire.v1.training import JobSpec
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobFailures
from everstep_controller.core.state import StalledRank, StallNotice
from everstep_controller.core.wording import format_duration, join_names, rank_ranges, ranks_named


class Wait(msgspec.Struct, frozen=True):
    """Do nothing until ``due`` (None: until the next report), and say ``notices``."""

    due: float | None = None
    notices: tuple[StallNotice, ...] = ()


class Replace(msgspec.Struct, frozen=True):
    """Kill the rank's process and regroup."""

    rank: Rank
    sentence: str


class RegroupAll(msgspec.Struct, frozen=True):
    """Let all ranks abort their collectives and regroup. ``step``: the last finished step, if all wait in them."""

    sentence: str
    step: int | None = None


class Fail(msgspec.Struct, frozen=True):
    """End the job."""

    sentence: str


Decision = Wait | Replace | RegroupAll | Fail


class JobStall(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose ranks make no progress, at one time.

    Attributes:
        stalled: The ranks without progress.
        moving: Further ranks of the generation that have not returned.
        steps: Last finished step by rank, where known.
        returned: Number of collectives of the ranks that returned (None: unknown).
    """

    stalled: Mapping[Rank, StalledRank]
    moving: Collection[Rank]
    steps: Mapping[Rank, int]
    returned: Mapping[Rank, int | None]
    now: float
    policy: CorePolicy
    spec: JobSpec
    failures: JobFailures

    @property
    def lowest(self) -> tuple[int, int]:
        """The position of the ranks for which the others wait."""
        return min(stalled.position for stalled in self.stalled.values())

    def limit_at(self, stalled: StalledRank) -> float:
        """Return when a rank counts as hung although it works."""
        return stalled.since + (self.spec.work_limit_s if stalled.limit_s is None else stalled.limit_s)

    def is_waiting(self, stalled: StalledRank) -> bool:
        """Return whether a rank waits for others: in a collective, or perhaps in one that a GPU computes."""
        ahead = stalled.may_wait and stalled.position > self.lowest
        return stalled.activity is RankActivity.COLLECTIVE or ahead

    def is_working(self, stalled: StalledRank) -> bool:
        """Return whether a rank works, within its limit."""
        works = stalled.activity is RankActivity.WORKING and not self.is_waiting(stalled)
        return works and self.now < self.limit_at(stalled)

    def floor_s(self, rank: Rank) -> float:
        """Return the seconds of standing still from which a rank counts as hung."""
        stalled = self.stalled[rank]
        if self.spec.hang_threshold_s is not None:
            # A rank's own threshold is longer in its first steps; an agent that reports a silent rank knows none.
            return max(stalled.threshold_s, self.spec.hang_threshold_s)
        floor = max(stalled.threshold_s, self.policy.stalls.hang_floor_s, 2 * self.failures.longest_pause_s)
        return float(floor * 2 ** self.hang_kills(rank))

    def hung_at(self, rank: Rank) -> float:
        """Return when a rank that is in no collective counts as hung."""
        stalled = self.stalled[rank]
        if stalled.activity is RankActivity.WORKING:
            return self.limit_at(stalled)
        return min(stalled.activity_since + self.floor_s(rank), self.limit_at(stalled))

    def hang_kills(self, rank: Rank) -> int:
        """Return how many hung ranks were replaced at the rank's place."""
        return self.failures.hang_kills.get(hang_key(rank, self.stalled[rank]), 0)

    def is_exhausted(self, rank: Rank) -> bool:
        """Return whether so many hung ranks were replaced at its place that another one needs a person's decision."""
        return self.hang_kills(rank) >= self.policy.stalls.hang_kills_per_place


def hang_key(rank: Rank, stalled: StalledRank) -> str:
    """Return by what the rank's hangs are counted: the place in the script, or the rank if it holds Python's lock."""
    return stalled.place or f"rank {rank}"


def decide(stall: JobStall) -> Decision:
    """Return what to do about ranks without progress."""
    if not stall.stalled:
        return Wait()
    if stall.moving:
        return _beside_moving_ranks(stall)
    if any(stall.is_working(stalled) for stalled in stall.stalled.values()):
        return _wait_for_work(stall)
    hung = {rank: stalled for rank, stalled in stall.stalled.items() if not stall.is_waiting(stalled)}
    if not hung:
        return _all_in_collectives(stall) if not stall.returned else _others_returned(stall)
    if stall.returned:
        return _still_after_return(stall, hung)
    if len(hung) < len(stall.stalled):
        return _some_block_others(stall, hung)
    return _none_waits(stall, hung)


# ---- no rank is hung


def _beside_moving_ranks(stall: JobStall) -> Decision:
    """Wait for the reports of the other ranks; only a single rank that stands still behind all others is replaced."""
    behind = [rank for rank, stalled in stall.stalled.items() if stalled.position == stall.lowest]
    (rank, *others) = behind
    stalled = stall.stalled[rank]
    if others or stall.is_waiting(stalled) or stall.returned:
        return Wait()
    if any(stall.steps.get(other, -1) <= stalled.step for other in stall.moving):
        return Wait()
    if stall.now < (due := stall.hung_at(rank)):
        return Wait(due)
    return _replace(stall, rank, f"{_describe(rank, stalled, stall.now)}, and all other ranks go on")


def _wait_for_work(stall: JobStall) -> Wait:
    """Do nothing, and name the ranks that work and those that wait for them."""
    policy, now = stall.policy, stall.now
    working = {rank: stalled for rank, stalled in stall.stalled.items() if stall.is_working(stalled)}
    waiting = [rank for rank, stalled in stall.stalled.items() if stall.is_waiting(stalled)]
    dues = [stall.limit_at(stalled) for stalled in working.values()]
    notices = []
    if waiting:
        since = max(stalled.since for stalled in working.values())
        dues.append(since + policy.stalls.notice_s)
        if now >= dues[-1]:
            notices.append(_name_work(working, waiting, since))
    for rank, stalled in working.items():
        if stalled.section or stalled.limit_s is not None or not stalled.place_since:
            continue
        dues.append(stalled.place_since + policy.stalls.call_notice_s)
        if now >= dues[-1]:
            notices.append(_name_call(stall, rank, stalled))
    return Wait(min((due for due in dues if due > now), default=None), tuple(notices))


def _name_work(working: Mapping[Rank, StalledRank], waiting: Collection[Rank], since: float) -> StallNotice:
    places = dict.fromkeys(_where(stalled) for stalled in working.values())
    where = next(iter(places)) if len(places) == 1 else ""
    doing = dict.fromkeys(stalled.doing for stalled in working.values() if stalled.doing)
    what = f" ({', '.join(list(doing)[:3])})" if doing else ""
    works = "works alone" if len(working) == 1 else "work"
    return StallNotice(
        key=f"works {sorted(working)}",
        since=since,
        text=f"{rank_ranges(working)} {works}{where} for {{time}}{what}; {_name_waiting(waiting)}",
        ranks=tuple(working),
    )


def _name_waiting(ranks: Collection[Rank], *, still: str = "") -> str:
    """Return such as ``ranks 0-2 wait``, or ``ranks 0-2 still wait``."""
    return f"{rank_ranges(ranks)} {still}{'waits' if len(ranks) == 1 else 'wait'}"


def _name_call(stall: JobStall, rank: Rank, stalled: StalledRank) -> StallNotice:
    limit = format_duration(stall.limit_at(stalled) - stalled.since)
    return StallNotice(
        key=f"call {rank}",
        since=stalled.place_since,
        text=f"rank {rank} has been in one call{_where(stalled)} for {{time}} and {stalled.doing or 'works'}: it may "
        f"never end. The rank is replaced after {limit} without progress (--work-limit-s)",
        ranks=(rank,),
        needs_person=True,
    )


# ---- some ranks are hung


def _some_block_others(stall: JobStall, hung: Mapping[Rank, StalledRank]) -> Decision:
    """Replace the rank for which others wait in collectives, once it has stood still for long enough."""
    due = max(map(stall.hung_at, hung))
    waiting = [rank for rank in stall.stalled if rank not in hung]
    wait = _name_waiting(waiting)
    exhausted = [rank for rank in hung if stall.is_exhausted(rank)]
    if stall.now >= due and not exhausted:
        blocked = f"{_describe_all(hung, stall.now)}; {wait}"
        if len(hung) == 1:
            return Replace(next(iter(hung)), blocked)
        return RegroupAll(f"{blocked}. All ranks abort their collectives and regroup")
    since = max(stalled.since for stalled in hung.values())
    floor = format_duration(max(map(stall.floor_s, hung)))
    remedy = f"After {floor} of that it is replaced (--hang-threshold-s)"
    key = f"still {sorted(hung)}"
    if exhausted:
        first = exhausted[0]
        replaced = "A rank was replaced there" if hung[first].place else f"Rank {first} was replaced for that"
        remedy = (
            f"{replaced} {stall.hang_kills(first)} times, so the script hangs by itself and is left alone: look at its "
            "stacks, then stop the job"
        )
        key = f"exhausted {hang_key(first, hung[first])}"
    notice_at = since + stall.policy.stalls.notice_s
    if stall.now < notice_at:
        return Wait(min(due, notice_at) if not exhausted else notice_at)
    text = f"{_describe_all(hung, None)}; {wait}. {remedy}"
    notice = StallNotice(key=key, since=since, text=text, ranks=tuple(hung), needs_person=bool(exhausted))
    return Wait(None if exhausted else due, (notice,))


def _none_waits(stall: JobStall, hung: Mapping[Rank, StalledRank]) -> Decision:
    """All ranks stand still and none waits in a collective. Only the job's own threshold makes that a hang."""
    is_certain = stall.spec.hang_threshold_s is not None or any(
        stalled.activity is RankActivity.BUSY_LOOP for stalled in hung.values()
    )
    due = max(stall.hung_at(rank) if is_certain else stall.limit_at(stalled) for rank, stalled in hung.items())
    if stall.now >= due:
        sentence = _describe_all(hung, stall.now)
        if len(hung) == 1:
            return _replace(stall, next(iter(hung)), sentence)
        return RegroupAll(f"{sentence}. All ranks regroup")
    since = max(stalled.activity_since for stalled in hung.values())
    notice_at = since + stall.policy.stalls.call_notice_s
    if stall.now < notice_at:
        return Wait(min(due, notice_at))
    limit = format_duration(due - max(stalled.since for stalled in hung.values()))
    text = f"{_describe_all(hung, None)}, and no rank waits for another. They restart after {limit} (--work-limit-s)"
    return Wait(due, (StallNotice(key="none waits", since=since, text=text, ranks=tuple(hung), needs_person=True),))


def _replace(stall: JobStall, rank: Rank, sentence: str) -> Decision:
    return Wait() if stall.is_exhausted(rank) else Replace(rank, sentence)


# ---- all ranks wait in collectives


def _all_in_collectives(stall: JobStall) -> Decision:
    """Regroup, since no single rank is at fault; name ranks that wait in different collectives."""
    if any(stalled.transfers for stalled in stall.stalled.values()):
        due = max(stall.limit_at(stalled) for stalled in stall.stalled.values())
    else:
        due = max(stalled.activity_since + stall.floor_s(rank) for rank, stalled in stall.stalled.items())
    since = max(stalled.since for stalled in stall.stalled.values())
    places = _by_operation(stall.stalled)
    where = "; ".join(f"{rank_ranges(ranks)} in {what}" for what, ranks in list(places.items())[:4])
    if stall.now < due:
        notice_at = since + stall.policy.stalls.notice_s
        if stall.now < notice_at:
            return Wait(min(due, notice_at))
        text = f"all ranks wait in collectives for {{time}}, and none works: {where}"
        return Wait(due, (StallNotice(key="collectives", since=since, text=text, ranks=tuple(stall.stalled)[:1]),))
    waited = format_duration(stall.now - since)
    sentence = f"all ranks have waited in collectives for {waited}, and none works: {where}"
    is_certain = all(stalled.waits_for_all for stalled in stall.stalled.values())
    step, again = stall.lowest[0], stall.failures.hung_collective_step == stall.lowest[0]
    behind = [rank for rank, stalled in stall.stalled.items() if stalled.position == stall.lowest]
    if is_certain and again and _differ(stall.stalled):
        return Fail(
            f"the ranks wait in different collectives after step {step}, for the second time: {where}. All ranks must "
            "call the same collectives in the same order"
        )
    if again and len(behind) == 1 < len(stall.stalled) and not stall.is_exhausted(behind[0]):
        return Replace(behind[0], f"{sentence}. Rank {behind[0]} is behind all others")
    different = " They wait in different collectives, which the script must not do." if _differ(stall.stalled) else ""
    return RegroupAll(f"{sentence}.{different} All ranks abort their collectives and regroup", step)


def _differ(stalled: Mapping[Rank, StalledRank]) -> bool:
    """Return whether ranks wait in different operations that should be the same one."""
    operations: dict[int, set[str]] = {}
    for rank in stalled.values():
        if rank.operation:
            operations.setdefault(rank.collectives, set()).add(rank.operation)
    return any(len(names) > 1 for names in operations.values())


def _by_operation(stalled: Mapping[Rank, StalledRank]) -> dict[str, list[Rank]]:
    groups: dict[str, list[Rank]] = {}
    for rank, waiting in stalled.items():
        operation = f"{waiting.operation or 'a collective'} (number {waiting.collectives} after step {waiting.step})"
        what = f"{operation}{_where(waiting)}"
        groups.setdefault(what, []).append(rank)
    return groups


# ---- other ranks have returned


def _others_returned(stall: JobStall) -> Decision:
    """Name the ranks that wait after others have returned, and end the job if they can only wait for returned ranks.

    A returned rank enters no collective any more. Collectives of all ranks are counted, which decides at once. Smaller
    groups may go on without the returned ranks: they are stuck if all remaining ranks wait and none works for long.
    """
    known = [count for count in stall.returned.values() if count is not None]
    are_of_all = all(stalled.waits_for_all for stalled in stall.stalled.values())
    transfers = any(stalled.transfers for stalled in stall.stalled.values())
    is_missed = are_of_all and bool(known) and any(rank.collectives > min(known) for rank in stall.stalled.values())
    is_certain = is_missed and not transfers
    since = max(stalled.activity_since for stalled in stall.stalled.values())
    due = max(stall.limit_at(stalled) for stalled in stall.stalled.values())
    if is_certain:
        due = since + stall.policy.stalls.returned_floor_s
    elif not are_of_all and not transfers:
        floor_s = max(map(stall.floor_s, stall.stalled))
        due = min(since + max(floor_s, stall.policy.stalls.returned_floor_s), due)
    if stall.now < due:
        notice_s = stall.policy.stalls.call_notice_s if transfers else stall.policy.stalls.notice_s
        return _wait_and_name(stall, due, notice_s)
    early = [rank for rank, count in stall.returned.items() if is_missed and count == min(known)]
    early = early or list(stall.returned)
    awaited = f" for {'it' if len(early) == 1 else 'them'}" if is_certain else ""
    idle = "" if is_certain or transfers else ", and none works"
    return Fail(
        f"{ranks_named(early)} returned from the training function, and {_name_waiting(stall.stalled)}{awaited} in "
        f"{_where_all(stall.stalled)}{idle}. All ranks must run the same steps to their end: let all of them decide "
        "alike before a step begins, for example on run.mean(loss)"
    )


def _wait_and_name(stall: JobStall, due: float, notice_s: float) -> Wait:
    """Do nothing until ``due``, and name the ranks that have returned and those that wait."""
    since = max(stalled.since for stalled in stall.stalled.values())
    if stall.now < since + notice_s:
        return Wait(min(due, since + notice_s))
    is_limit = due >= max(stall.limit_at(stalled) for stalled in stall.stalled.values())
    left = f"{ranks_named(list(stall.returned))} {'has' if len(stall.returned) == 1 else 'have'} left"
    waiting = _name_waiting(stall.stalled, still="still ")
    due_s = format_duration(due - max(stalled.activity_since for stalled in stall.stalled.values()))
    text = (
        f"{left} the training function; {waiting} in {_where_all(stall.stalled)} for {{time}}. The job ends after "
        f"{due_s} of that ({'--work-limit-s' if is_limit else '--hang-threshold-s'})"
    )
    return Wait(due, (StallNotice(key="returned", since=since, text=text, ranks=tuple(stall.stalled)[:1]),))


def _where_all(stalled: Mapping[Rank, StalledRank]) -> str:
    """Return in which collectives the ranks wait, such as ``all_reduce at train.py:17 after step 5``."""
    ranks = stalled.values()
    places = list(dict.fromkeys(_where(waiting) for waiting in ranks))
    shared = places[0] if len(places) == 1 else ""
    operations = dict.fromkeys(f"{one.operation or 'a collective'}{'' if shared else _where(one)}" for one in ranks)
    return f"{join_names(list(operations), 4)}{shared} after step {min(waiting.step for waiting in ranks)}"


def _still_after_return(stall: JobStall, hung: Mapping[Rank, StalledRank]) -> Decision:
    """Leave ranks alone that stand still after others have returned, such as one that saves; end at the work limit."""
    due = max(stall.limit_at(stalled) for stalled in hung.values())
    if stall.now < due:
        return Wait(due)
    count = len(stall.returned)
    returned = f"rank {next(iter(stall.returned))} has" if count == 1 else f"{count} other ranks have"
    return Fail(
        f"{_describe_all(hung, stall.now)}, and {returned} returned from the training function. All ranks must run the "
        "same steps (if one rank legitimately works alone for that long, raise --work-limit-s)"
    )


# ---- words


def _describe(rank: Rank, stalled: StalledRank, now: float | None) -> str:
    return _describe_all({rank: stalled}, now)


def _describe_all(hung: Mapping[Rank, StalledRank], now: float | None) -> str:
    """Return what the ranks do and since when; ``now`` None leaves the time open."""
    since = max(stalled.since for stalled in hung.values())
    time = "{time}" if now is None else format_duration(now - since)
    places = dict.fromkeys(_where(stalled) for stalled in hung.values())
    where = next(iter(places)) if len(places) == 1 else ""
    verbs = dict.fromkeys(_verb(stalled.activity, len(hung) == 1) for stalled in hung.values())
    return f"{rank_ranges(hung)} {' or '.join(verbs)}{where} for {time}"


_VERBS = {
    RankActivity.WORKING: ("has worked without progress", "have worked without progress"),
    RankActivity.BUSY_LOOP: ("runs a loop in which nothing changes", "run a loop in which nothing changes"),
}


def _verb(activity: RankActivity | None, is_single: bool) -> str:
    single, several = _VERBS.get(activity, ("stands still", "stand still")) if activity else ("makes no progress",) * 2
    return single if is_single else several


def _where(stalled: StalledRank) -> str:
    section = f' in "{stalled.section}"' if stalled.section else ""
    return f"{section} at {stalled.place}" if stalled.place else section
