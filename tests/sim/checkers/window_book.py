"""Which maintenance windows there are, by what people ordered and by what was written of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from everstep_controller.core.effects import Audit, DeleteNode, Effect
from everstep_controller.core.events import OperatorAction, OperatorCommand

from tests.sim import facts

if TYPE_CHECKING:
    from tests.sim.world import World

ORDERS = (OperatorAction.MAINTENANCE, OperatorAction.CANCEL_MAINTENANCE, OperatorAction.READMIT)
BEGUN = "maintenance.started"


class _Entry(NamedTuple):
    """Something that happened to windows: an order, or that a planned one of ``subject`` began."""

    trace: str
    at: float
    order: OperatorCommand | None
    subject: str = ""


class Window:
    """``subject``: a node, or ``rack r``. ``without``: who was given back early."""

    def __init__(self, entry: _Entry, order: OperatorCommand) -> None:
        assert order.until is not None
        self.subject = order.node or f"rack {order.rack}"
        self.starts_at = max(entry.at, order.starts_at or entry.at)
        self.until = order.until
        self.begun = self.starts_at <= entry.at
        self.without: set[str] = set()

    def __str__(self) -> str:
        return f"the window of {self.subject} from {self.starts_at:.2f} to {self.until:.2f}"


class WindowBook:
    """Follows orders as they are carried out; whoever takes over knows those that were written."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self._entries: list[_Entry] = []
        self._written: set[str] = set()

    def durable(self, fact: facts.Durable) -> None:
        self._written |= {row.trace for row in fact.batch.audit}

    def took_over(self) -> None:
        self._entries, entries = [], self._entries
        self.windows = []
        for entry in entries:
            if entry.trace in self._written:
                self._enter(entry)

    def order(self, fact: facts.Handled) -> None:
        """Call before what follows from the event is looked at."""
        event = fact.event
        if isinstance(event, OperatorCommand) and event.action in ORDERS:
            self._enter(_Entry(event.trace, fact.at, event))

    def follow(self, effect: Effect, at: float) -> None:
        """Call for each effect, in order."""
        if isinstance(effect, Audit) and effect.entry.kind == BEGUN:
            subject = effect.entry.node or effect.entry.sentence.removeprefix("maintenance of ").partition(" begins")[0]
            self._enter(_Entry(effect.entry.trace, at, None, subject))
        elif isinstance(effect, DeleteNode):
            self.windows = [window for window in self.windows if window.subject != effect.node]

    def _enter(self, entry: _Entry) -> None:
        self._entries.append(entry)
        order = entry.order
        if order is None:
            for window in self.windows:
                window.begun = window.begun or (window.subject == entry.subject and window.starts_at <= entry.at)
        elif order.action is OperatorAction.MAINTENANCE:
            self.windows.append(Window(entry, order))
        elif order.action is OperatorAction.CANCEL_MAINTENANCE:
            subject = order.node or f"rack {order.rack}"
            self.windows = [one for one in self.windows if one.begun or one.subject != subject]
        else:
            for window in self.windows:
                if window.begun and order.node:
                    window.without.add(order.node)

    # --- questions ---------------------------------------------------------------------------------------------------

    def of(self, world: World, node: str) -> Iterator[Window]:
        """Windows that mean the node, whether they have begun or not, but for those that it was taken out of."""
        subjects = {node, f"rack {world.machines[node].domain.rack}"}
        return (one for one in self.windows if one.subject in subjects and node not in one.without)

    def active(self, world: World, node: str, now: float) -> Window | None:
        """The longest one that the node is in."""
        begun = (one for one in self.of(world, node) if one.begun and now < one.until)
        return max(begun, key=lambda one: one.until, default=None)
