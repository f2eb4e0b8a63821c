"""The controller's event log as operators follow it: server-sent events, each with the time of its arrival."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from typing import Any, NamedTuple

from bench.load.fleet import Controller


class Seen(NamedTuple):
    """One line of the event log. ``at``: wall seconds of its arrival here."""

    at: float
    kind: str
    node: str
    sentence: str


class Follower:
    """Reads the stream in a thread until the controller ends."""

    def __init__(self, controller: Controller) -> None:
        self.seen: list[Seen] = []
        request = urllib.request.Request(f"http://{controller.address}/v1/events/stream", headers=controller.headers)
        self._answer = urllib.request.urlopen(request, timeout=60)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data:"):
                    event: dict[str, Any] = json.loads(line[5:])
                    self.seen.append(
                        Seen(time.time(), event["kind"], event.get("node") or "", event.get("sentence") or "")
                    )
        except (OSError, ValueError):
            return  # the controller has ended

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
