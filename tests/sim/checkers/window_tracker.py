"""Track maintenance windows as operators order them, and as the database keeps them over takeovers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from everstep_controller.core.effects import AppendToEventLog, DeleteNode, Effect, EventLogEntry
from everstep_controller.core.events import OperatorAction, OperatorCommand
from tests.sim.cluster.observations import BatchWritten, EventHandled

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

WINDOW_COMMANDS = (OperatorAction.MAINTENANCE, OperatorAction.CANCEL_MAINTENANCE, OperatorAction.READMIT)
"""Commands that order, cancel or leave a window."""
WINDOW_STARTED = "maintenance.started"
"""Kind of the log entry of a planned window's beginning."""


def window_subject(entry: EventLogEntry) -> str:
    """Return the node, or ``rack r``, whose window begins by a log entry."""
    return entry.node or entry.sentence.removeprefix("maintenance of ").partition(" begins")[0]


class _Change(NamedTuple):
    """A change of windows: an operator's ``command``, or the beginning of the planned window of ``subject``."""

    trace: str
    at: float
    command: OperatorCommand | None
    subject: str = ""


class Window:
    """A window of ``subject``: a node, or ``rack r``. ``readmitted_nodes``: nodes that were readmitted early."""

    def __init__(self, change: _Change, command: OperatorCommand) -> None:
        assert command.until is not None
        self.subject = command.node or f"rack {command.rack}"
        self.starts_at = max(change.at, command.starts_at or change.at)
        self.until = command.until
        self.has_begun = self.starts_at <= change.at
        self.readmitted_nodes: set[str] = set()

    def __str__(self) -> str:
        return f"the window of {self.subject} from {self.starts_at:.2f} to {self.until:.2f}"


class WindowTracker:
    """Follow commands as the leader handles them. A new leader knows only the commands that were written."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self._changes: list[_Change] = []
        self._written_traces: set[str] = set()

    def note_write(self, write: BatchWritten) -> None:
        """Note which changes became durable."""
        self._written_traces |= {row.trace for row in write.batch.event_log}

    def start_leader(self) -> None:
        """Forget the changes that a new leader does not know."""
        self._changes, changes = [], self._changes
        self.windows = []
        for change in changes:
            if change.trace in self._written_traces:
                self._apply(change)

    def note_command(self, handled: EventHandled) -> None:
        """Note an operator's command. Call this before checking the event's effects."""
        event = handled.event
        if isinstance(event, OperatorCommand) and event.action in WINDOW_COMMANDS:
            self._apply(_Change(event.trace, handled.at, event))

    def note_effect(self, effect: Effect, at: float) -> None:
        """Note an effect. Call this for each effect of an event, in order."""
        if isinstance(effect, AppendToEventLog) and effect.entry.kind == WINDOW_STARTED:
            self._apply(_Change(effect.entry.trace, at, None, window_subject(effect.entry)))
        elif isinstance(effect, DeleteNode):
            self.windows = [window for window in self.windows if window.subject != effect.node]

    def _apply(self, change: _Change) -> None:
        self._changes.append(change)
        command = change.command
        if command is None:
            for window in self.windows:
                if window.subject == change.subject and window.starts_at <= change.at:
                    window.has_begun = True
        elif command.action is OperatorAction.MAINTENANCE:
            self.windows.append(Window(change, command))
        elif command.action is OperatorAction.CANCEL_MAINTENANCE:
            subject = command.node or f"rack {command.rack}"
            self.windows = [window for window in self.windows if window.has_begun or window.subject != subject]
        else:
            for window in self.windows:
                if window.has_begun and command.node:
                    window.readmitted_nodes.add(command.node)

    def windows_of(self, world: World, node: str) -> Iterator[Window]:
        """Return the node's windows, planned or begun, except those from which it was readmitted."""
        subjects = {node, f"rack {world.machines[node].domain.rack}"}
        return (window for window in self.windows if window.subject in subjects and node not in window.readmitted_nodes)

    def active(self, world: World, node: str, now: float) -> Window | None:
        """Return the begun window of the node that ends last, or None if there is none."""
        begun = (window for window in self.windows_of(world, node) if window.has_begun and now < window.until)
        return max(begun, key=lambda window: window.until, default=None)
