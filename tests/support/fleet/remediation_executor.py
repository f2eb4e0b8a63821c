"""A remediation executor over a remediator in memory, with recorded transactions in place of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from everstep.clock import Backoff
from everstep.errors import Conflict, Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import RemediationFinished
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.remediator import CordonStatus, Remediator
from everstep_controller.store.rows import RemediationRow, RemediationState

AT_ONCE = Backoff(floor_s=0.0, ceiling_s=0.0)


class FakeRemediator:
    """A remediator in memory.

    Args:
        pending: Number of queries before a remediation shows as done.
        refuses: Whether every request is refused.
        failures: Number of requests that fail at first.
    """

    name = "fake"
    dry_run = False

    def __init__(self, pending: int = 0, refuses: bool = False, failures: int = 0) -> None:
        self.kinds = frozenset({RemediationKind.CORDON, RemediationKind.UNCORDON, RemediationKind.REBOOT})
        self.pending, self.refuses, self.failures_left = pending, refuses, failures
        self.applied: list[str] = []

    def apply(self, remediation: Remediation) -> None:
        if self.failures_left > 0:
            self.failures_left -= 1
            raise Unavailable("it does not answer")
        if self.refuses:
            raise Conflict("it will not")
        self.applied.append(remediation.id)

    def is_done(self, remediation: Remediation) -> bool:
        self.pending -= remediation.id in self.applied
        return remediation.id in self.applied and self.pending < 0

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        return {}

    def close(self) -> None:
        pass


class RecordedTransactions:
    """The loop's transactions, which record the written rows and the core's events in order.

    Args:
        failures: Number of transactions that are refused at first.
        unconfirmed: Number of later transactions that are taken but not confirmed.
    """

    def __init__(self, failures: int = 0, unconfirmed: int = 0) -> None:
        self.written: list[RemediationRow] = []
        self.events: list[RemediationFinished] = []
        self.failures_left = failures
        self.unconfirmed_left = unconfirmed
        self.now = 1000.0
        self.loop: asyncio.AbstractEventLoop

    async def submit(self, stimulus: Callable[[Any, float], None]) -> None:
        self.loop = asyncio.get_running_loop()
        if self.failures_left > 0:
            self.failures_left -= 1
            raise Unavailable("the database is away", 0.0)
        stimulus(self, self.now)
        if self.unconfirmed_left > 0:
            self.unconfirmed_left -= 1
            raise Unavailable("the database is away, so this is kept in memory only", 0.0)

    def put_remediation(self, row: RemediationRow) -> None:
        self.written.append(row)

    def handle(self, event: RemediationFinished, _now: float) -> None:
        self.events.append(event)

    def states(self, remediation: str) -> list[str]:
        return [row.state.value for row in self.written if row.id == remediation]


def requested_row(
    number: int,
    kind: RemediationKind = RemediationKind.CORDON,
    node: str = "n1",
    at: float = 1.0,
    due: float = 0.0,
    **more: Any,
) -> RemediationRow:
    """Return the row of a requested remediation. ``more``: further fields, or other values."""
    sentence = "it fell off the bus"
    remediation = Remediation(
        id=f"{node}-a{number}", node=node, kind=kind, sentence=sentence, at=at, trace="t", deadline=due
    )
    row = RemediationRow(
        id=remediation.id,
        node=node,
        kind=kind,
        state=RemediationState.REQUESTED,
        requested_at=float(number),
        doc=msgspec.json.encode(remediation).decode(),
    )
    return msgspec.structs.replace(row, **more)


def run_executor(
    remediator: Remediator,
    transactions: RecordedTransactions,
    *rows: RemediationRow,
    left: Sequence[RemediationRow] = (),
    **more: Any,
) -> None:
    """Run all remediations to their end."""

    async def to_the_end() -> None:
        executor = RemediationExecutor(
            remediator,
            submit=transactions.submit,
            now=lambda: transactions.now,
            uniform=lambda: 0.0,
            rows=left,
            backoff=AT_ONCE,
            **more,
        )
        executor.start()
        executor.enqueue(rows)
        async with asyncio.timeout(60):
            while executor.open_count():
                await asyncio.sleep(0)
        await executor.stop()

    asyncio.run(to_the_end())
