"""Replay a journal and compare today's decisions with the recorded ones.

With the same code and policy, every event leads to the recorded decisions. With newer code or another policy, replay
shows the differences. After the first difference, the recorded events no longer fit the replayed state: read them so.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from everstep import __version__
from everstep.errors import DECODE_ERRORS, EverstepError, MalformedMessage, NotFound
from everstep.printable_text import escape_control, printable_json
from everstep.vocabulary import Verdict
from everstep_controller.core import engine
from everstep_controller.core.effects import Effect, PutVerdict, describe, digest
from everstep_controller.core.events import Event, HeartbeatChanged, OperatorCommand, ReportArrived
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import FleetState
from everstep_controller.journal.recorder import JournalEntry, decode_state, read_segment, segments
from everstep_controller.policy.rulebook import with_rules

HIDDEN_DIFFERENCE = (
    "! the decisions print the same but differ in details: nodes, GPUs, groups, a record or other fields of a directive"
)


class ReplayedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event, decided again."""

    at: float
    event_name: str
    trace: str
    node: str
    job: str
    recorded: tuple[str, ...]  # recorded decisions, as lines
    replayed: tuple[str, ...]  # today's decisions, as lines
    verdicts: tuple[Verdict, ...]  # today's verdicts
    is_operator_order: bool  # an operator's order about a node
    has_hidden_difference: bool = False  # equal lines, but the complete effects differ

    @property
    def differs(self) -> bool:
        return self.has_hidden_difference or self.recorded != self.replayed

    def difference(self) -> list[str]:
        """Return a unified diff without its header: ``-`` recorded, ``+`` replayed."""
        if self.has_hidden_difference:
            return [*(f" {line}" for line in self.replayed), HIDDEN_DIFFERENCE]
        return list(difflib.unified_diff(self.recorded, self.replayed, lineterm="", n=100))[3:]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """An open segment, whose events are decided again one by one."""

    version: str  # release that wrote the segment
    begins_at: float
    is_continuation: bool  # nothing is missing between the segment before and this one
    state: FleetState  # advances with ``events``
    events: Iterator[ReplayedEvent]


def replay(segment: Path, policy: CorePolicy | None = None, before: FleetState | None = None) -> Recording:
    """Decide a segment again, from ``before`` and under ``policy`` if given. Raises MalformedMessage."""
    beginning, entries = read_segment(segment)
    if before is not None and beginning.is_continuation:
        state = before
    else:
        try:
            state = decode_state(beginning.state)
        except DECODE_ERRORS as error:
            raise MalformedMessage(
                f"{segment} was written by everstep {beginning.version}, and this release ({__version__}) cannot read "
                f"its state: replay it with that release ({error})"
            ) from error
        if policy is not None:
            state.policy = with_rules(policy).validate()
    return Recording(
        version=beginning.version,
        begins_at=beginning.at,
        is_continuation=beginning.is_continuation,
        state=state,
        events=_steps(state, entries),
    )


def _steps(state: FleetState, entries: Iterable[JournalEntry]) -> Iterator[ReplayedEvent]:
    for entry in entries:
        now, verdicts, today = _replay_entry(state, entry)
        event = entry.event
        subject = event.body if isinstance(event, ReportArrived) else event
        yield ReplayedEvent(
            at=entry.at,
            event_name=_name(event),
            trace=event.trace,
            node=getattr(event, "node", None) or "",
            job=getattr(subject, "job", None) or "",
            recorded=entry.decisions,
            replayed=now,
            verdicts=verdicts,
            is_operator_order=isinstance(event, OperatorCommand) and bool(event.node),
            has_hidden_difference=now == entry.decisions and entry.digest != today,
        )


def _replay_entry(state: FleetState, entry: JournalEntry) -> tuple[tuple[str, ...], tuple[Verdict, ...], int]:
    """Return today's decisions as lines, the verdicts among them, and a digest of the complete effects."""
    try:
        effects: list[Effect] = engine.run_transition(state, entry.event, entry.at, entry.reads).finish()
    except EverstepError as error:  # after a difference, the node or job may not exist
        return (f"refused ({error.code}): {error}",), (), 0
    verdicts = tuple(effect.verdict for effect in effects if isinstance(effect, PutVerdict))
    return tuple(describe(effects)), verdicts, digest(effects)


def _name(event: Event) -> str:
    """Return a short name of the event."""
    if isinstance(event, ReportArrived):
        return f"{type(event.body).__name__} from {event.node}"
    if isinstance(event, HeartbeatChanged):
        return f"heartbeat of {event.node}"
    return type(event).__name__


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Events to print."""

    node: str = ""
    job: str = ""
    trace: str = ""
    since: float = float("-inf")
    until: float = float("inf")
    differences_only: bool = False

    def includes(self, step: ReplayedEvent) -> bool:
        """Return whether to print the event. A node or job may also be named by a decision."""
        if not self.since <= step.at <= self.until or (self.differences_only and not step.differs):
            return False
        if self.trace and step.trace != self.trace:
            return False
        lines = (*step.recorded, *step.replayed)
        return all(
            not name or name == subject or any(_names(line, name) for line in lines)
            for name, subject in ((self.node, step.node), (self.job, step.job))
        )


def _names(line: str, name: str) -> bool:
    return name in line.replace(",", " ").replace(":", " ").replace(";", " ").split()


def run(log: Path, selection: Selection, *, as_json: bool) -> int:
    """Print the incident. Return 1 if any decision differs, else 0. Raises NotFound or MalformedMessage."""
    paths = segments(log) if log.is_dir() else [log]
    if not paths or not paths[0].exists():
        raise NotFound(f"no journal in {log}: give the directory that journal_dir names, or a *.journal file")
    events = differences = 0
    for path in paths:
        recording = replay(path)
        if not as_json:
            other = "" if recording.version == __version__ else f", replayed by {__version__}"
            print(f"{path.name}: from {_when(recording.begins_at)}, written by everstep {recording.version}{other}")
        for step in recording.events:
            events += 1
            differences += step.differs
            if selection.includes(step):
                _show(step, as_json)
    if not as_json and differences:
        verb = "decision differs" if differences == 1 else "decisions differ"
        print(f"{events} events; {differences} {verb} in this release (- recorded, + replayed)")
    elif not as_json:
        print(f"{events} events; all decisions are the same as recorded")
    return 1 if differences else 0


def _show(step: ReplayedEvent, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(printable_json(step) + "\n")
    elif step.differs or step.replayed:
        print(f"{_when(step.at)}  {step.event_name}  [{step.trace}]")
        for line in step.difference() if step.differs else step.replayed:
            print(f"    {escape_control(line)}")


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
