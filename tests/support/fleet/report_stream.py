"""An agent that reports continuously to the leader among several controllers, and counts acknowledged reports."""

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
from tests.support.fleet.controllers import VIEWER, ControllerProcess, registration
from tests.support.fleet.session_client import send_message

EVERY_FINDING = "events_per_node_burst = 1000000\n[policy.findings]\nburst_count = 1000000\n"
"""Settings under which every report adds an entry to the event log, without a limit."""


def finding(number: int) -> FindingRaised:
    """Return a report that shows its number in the event log."""
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
    """Send the reports of node ``n1``, a few at a time, each repeatedly until a controller acknowledges it."""

    PER_REQUEST = 7

    def __init__(self, controllers: Sequence[ControllerProcess]) -> None:
        super().__init__(daemon=True)
        self.controllers = controllers
        self.acknowledged = 0
        self.over = threading.Event()

    def run(self) -> None:
        attempt = 0
        while not self.over.is_set():
            controller = self.controllers[attempt % len(self.controllers)]
            try:
                status, answer = self._report(controller)
            except (OSError, EOFError):
                status, answer = 0, None
            if status == 200:
                self.acknowledged = answer.through
                continue
            if status != 404:  # 404: the new leader did not know the node, which has registered meanwhile
                attempt += 1
                self.over.wait(0.005)

    def _report(self, controller: ControllerProcess) -> tuple[int, Any]:
        numbers = range(self.acknowledged + 1, self.acknowledged + 1 + self.PER_REQUEST)
        batch = tuple(NumberedReport(number=number, body=finding(number)) for number in numbers)
        answer = send_message(controller, "n1", Reports(incarnation=1, reports=batch), timeout_s=2.0)
        if answer[0] == 404:
            send_message(controller, "n1", registration("n1"), timeout_s=2.0)
        return answer

    def check(self, leader: ControllerProcess) -> None:
        """Check that the leader's event log has every acknowledged report once and in order."""
        raised = [event.sentence.split(" (n1)")[0] for event in events(leader, "finding")]
        assert raised[: self.acknowledged] == [f"report {number}" for number in range(1, self.acknowledged + 1)]
        assert len(raised) == len(set(raised))


@contextmanager
def reporting(*controllers: ControllerProcess) -> Iterator[ReportStream]:
    """Run a stream inside the block, and end it afterwards."""
    stream = ReportStream(controllers)
    stream.start()
    try:
        yield stream
    finally:
        stream.over.set()
        stream.join(30)


def events(controller: ControllerProcess, kind: str) -> list[op.Event]:
    """Return all events of one kind in the event log."""
    found: list[op.Event] = []
    after = 0
    while True:
        _, body = controller.ask("GET", f"/v1/events?after={after}&limit=1000", None, VIEWER)
        page = msgspec.json.decode(body, type=op.EventList)
        if not page.events:
            return [event for event in found if event.kind == kind]
        found += page.events
        after = page.next_after
