"""The controller's event log as operators follow it: a stream, each event with the time of its arrival."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import NamedTuple

from bench.load.fleet import Controller
from everstep.client import Client
from everstep.errors import EverstepError
from everstep.wire.v1.operator import Event


class Seen(NamedTuple):
    """One line of the event log. ``at``: wall seconds of its arrival here."""

    at: float
    kind: str
    node: str


class Follower:
    """Reads the stream in a thread until the controller ends."""

    def __init__(self, controller: Controller) -> None:
        self.seen: list[Seen] = []
        client = Client(f"http://{controller.address}", controller.token)  # the other one's is of another thread
        threading.Thread(target=self._read, args=(client, client.status().newest_event), daemon=True).start()

    def _read(self, client: Client, after: int) -> None:
        with contextlib.suppress(EverstepError):  # the controller has ended
            for event in client.stream(after):
                if isinstance(event, Event):
                    self.seen.append(Seen(time.time(), event.kind, event.node or ""))

    def kinds(self, since: int = 0) -> Counter[str]:
        """Return the number of events of each kind."""
        return Counter(event.kind for event in self.seen[since:])

    def first_verdicts(self, nodes: set[str], since: int = 0) -> dict[str, Seen]:
        """The first verdict on each of the nodes."""
        found: dict[str, Seen] = {}
        for event in self.seen[since:]:
            if event.kind.startswith("verdict.") and event.node in nodes:
                found.setdefault(event.node, event)
        return found
