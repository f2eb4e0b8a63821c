"""An agent that reports without end, to whichever of several controllers leads, and remembers what was acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import NumberedReport, Reports
from everstep.wire.v1.training import FindingRaised
from tests.support.controllers import VIEWER, ControllerProcess, registration
from tests.support.sessions import tell

EVERY_FINDING = "audit_entries_per_node_burst = 1000000\n[policy]\nfinding_burst_count = 1000000\n"
"""Settings under which every report leaves a line in the audit log, however many there are."""


def finding(number: int) -> FindingRaised:
    """A report that says its number in the audit log."""
    return FindingRaised(
        finding=Finding(
            kind=FindingKind.HOST_DISK,
            subject=f"/{number}",
            severity=Severity.WARNING,
            message=f"report {number}",
            action=Action.NONE,
        )
    )


class ReportStream(threading.Thread):
    """Sends the reports of node ``n1``, a few at a time, each again until somebody has acknowledged it."""

    PER_REQUEST = 7

    def __init__(self, controllers: Sequence[ControllerProcess]) -> None:
        super().__init__(daemon=True)
        self.controllers = controllers
        self.acknowledged = 0
        self.over = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self.over.is_set():
            controller = self.controllers[turn % len(self.controllers)]
            try:
                status, answer = self._report(controller)
            except (OSError, EOFError):
                status, answer = 0, None
            if status == 200:
                self.acknowledged = answer.through
                continue
            if status != 404:  # else it leads now, and wants the node to register, which was done
                turn += 1
                self.over.wait(0.005)

    def _report(self, controller: ControllerProcess) -> tuple[int, Any]:
        numbers = range(self.acknowledged + 1, self.acknowledged + 1 + self.PER_REQUEST)
        batch = tuple(NumberedReport(number=number, body=finding(number)) for number in numbers)
        told = tell(controller, "n1", Reports(incarnation=1, reports=batch), timeout_s=2.0)
        if told[0] == 404:
            tell(controller, "n1", registration("n1"), timeout_s=2.0)
        return told

    def check(self, leader: ControllerProcess) -> None:
        """Everything acknowledged is in the leader's audit log, in order, and nothing twice."""
        raised = [event.sentence.split(" (n1)")[0] for event in events(leader, "finding")]
        assert raised[: self.acknowledged] == [f"report {number}" for number in range(1, self.acknowledged + 1)]
        assert len(raised) == len(set(raised))


@contextmanager
def reporting(*controllers: ControllerProcess) -> Iterator[ReportStream]:
    """A stream that runs, and has ended at the end."""
    stream = ReportStream(controllers)
    stream.start()
    try:
        yield stream
    finally:
        stream.over.set()
        stream.join(30)


def events(controller: ControllerProcess, kind: str) -> list[op.Event]:
    """All of this kind in the audit log."""
    found: list[op.Event] = []
    after = 0
    while True:
        _, body = controller.ask("GET", f"/v1/events?after={after}&limit=1000", None, VIEWER)
        page = msgspec.json.decode(body, type=op.EventList)
        if not page.events:
            return [event for event in found if event.kind == kind]
        found += page.events
        after = page.next_after
