"""A journal decided again: the same decisions today, or what differs; and what another policy would have done.

With the code and the policy of the time, every event leads to the same decisions as then. With a newer core the
differences are shown as they arise; from the first one on, what follows in the journal happened in a world that had
gone another way, and is to be read so. The same holds for another policy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from controller.core import fleet
from controller.core.describe import describe
from controller.core.effects import Effect, PutVerdict
from controller.core.events import Event, HeartbeatChanged, ReportArrived
from controller.core.policy import CorePolicy
from controller.core.state import FleetState
from controller.journal import Entry, read_segment, segments
from controller.rulebook import with_rules
from everstep import __version__
from everstep.errors import EverstepError, MalformedMessage, NotFound
from everstep.vocabulary import Decision, Verdict


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One event, decided again. ``then`` and ``now`` are decisions in lines; ``verdicts`` are today's."""

    at: float
    what: str
    trace: str
    node: str
    job: str
    then: tuple[str, ...]
    now: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def differs(self) -> bool:
        return self.then != self.now

    def difference(self) -> list[str]:
        """A unified difference without its header: ``-`` then, ``+`` now."""
        return list(difflib.unified_diff(self.then, self.now, lineterm="", n=100))[3:]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A segment, opened: which release wrote it, when it begins, and its events decided again, one by one."""

    version: str
    begins_at: float
    steps: Iterator[Step]

    @property
    def is_of_this_release(self) -> bool:
        return self.version == __version__


def replay(segment: Path, policy: CorePolicy | None = None) -> Recording:
    """Decides a segment again, with the policy of the time or with ``policy``.

    Raises MalformedMessage for what is no journal, or one whose state this release does not understand.
    """
    beginning, entries = read_segment(segment)
    try:
        state = msgspec.msgpack.decode(beginning.state, type=FleetState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(
            f"{segment} was written by everstep {beginning.version}, whose state this release ({__version__}) does not "
            f"understand: replay it with that release ({error})"
        ) from error
    if policy is not None:
        state.policy = with_rules(policy).validate()
    return Recording(version=beginning.version, begins_at=beginning.at, steps=_steps(state, entries))


def _steps(state: FleetState, entries: Iterable[Entry]) -> Iterator[Step]:
    for entry in entries:
        now, verdicts = _again(state, entry)
        event = entry.event
        yield Step(
            at=entry.at,
            what=_name(event),
            trace=event.trace,
            node=getattr(event, "node", None) or "",
            job=_job_of(event),
            then=entry.decisions,
            now=now,
            verdicts=verdicts,
        )


def _again(state: FleetState, entry: Entry) -> tuple[tuple[str, ...], tuple[Verdict, ...]]:
    try:
        effects: list[Effect] = fleet.take(state, entry.event, entry.at, entry.reads).finish()
    except EverstepError as error:  # in a world that went another way, a node or a job may not be there
        return (f"refused ({error.code}): {error}",), ()
    verdicts = tuple(effect.verdict for effect in effects if isinstance(effect, PutVerdict))
    return tuple(describe(effects)), verdicts


def _name(event: Event) -> str:
    """What the event is, in a word or two."""
    if isinstance(event, ReportArrived):
        return f"{type(event.body).__name__} from {event.node}"
    if isinstance(event, HeartbeatChanged):
        return f"beat of {event.node}"
    return type(event).__name__


def _job_of(event: Event) -> str:
    subject = event.body if isinstance(event, ReportArrived) else event
    return getattr(subject, "job", None) or ""


# --- another policy ----------------------------------------------------------------------------------------------


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy would have done with a stretch of the past. ``at`` of verdicts is when.

    ``also``: evictions that it would have carried out and that did not happen; ``not_then``: evictions that happened
    and would not have. ``evictions``: how many it would have carried out in all; ``events``: how many were decided
    again, from ``since`` on.
    """

    since: float | None
    events: int
    evictions: int
    also: tuple[Verdict, ...]
    not_then: tuple[str, ...]


def what_if(journal: Path, policy: CorePolicy, since: float) -> WhatIf:
    """Decides everything in ``journal`` (a directory) from ``since`` on again under ``policy``.

    Raises NotFound where nothing was recorded since then, MalformedMessage as ``replay``.
    """
    reached = _reaching(segments(journal), since)
    if not reached:
        raise NotFound(f"nothing is recorded in {journal}: a journal is kept when journal_dir is set")
    events, evictions, also, not_then, began = 0, 0, list[Verdict](), list[str](), None
    for segment in reached:
        for step in replay(segment, policy).steps:
            if step.at < since:
                continue
            began = step.at if began is None else began
            events += 1
            evicted = [verdict for verdict in step.verdicts if verdict.decision is Decision.EVICT]
            evictions += len(evicted)
            then = {_evicted(line) for line in step.then} - {""}
            also += [verdict for verdict in evicted if verdict.node not in then]
            not_then += [
                line for line in step.then if (node := _evicted(line)) and node not in {v.node for v in evicted}
            ]
    return WhatIf(since=began, events=events, evictions=evictions, also=tuple(also), not_then=tuple(not_then))


def _reaching(found: list[Path], since: float) -> list[Path]:
    """Segments with events after ``since``: all that begin later, and the one before them."""
    later = [path for path in found if int(path.name[:15]) / 1000 > since]
    return found[-len(later) - 1 :]


def _evicted(line: str) -> str:
    """The node that a line of ``describe`` evicts, empty for any other line."""
    if not line.startswith("verdict ") or f"({Decision.EVICT}): " not in line:
        return ""
    return line.split()[1].rpartition("-")[0]
