"""A desk's remedies, carried out by machines in memory and written into a book instead of a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import RemediationFinished
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.remediator import CordonStatus, Remediator
from everstep_controller.store.rows import RemediationRow, RemediationState

from everstep.clock import Backoff
from everstep.errors import Conflict, Unavailable

AT_ONCE = Backoff(floor_s=0.0, ceiling_s=0.0)


class Machine:
    """A remediator over machines in memory. ``pending``: how often it is asked before a remedy shows; ``refuses``."""

    name = "machine"
    dry_run = False

    def __init__(self, pending: int = 0, refuses: bool = False, away: int = 0) -> None:
        self.kinds = frozenset({RemediationKind.CORDON, RemediationKind.UNCORDON, RemediationKind.REBOOT})
        self.pending, self.refuses, self.away = pending, refuses, away
        self.applied: list[str] = []

    def apply(self, remedy: Remediation) -> None:
        if self.away > 0:
            self.away -= 1
            raise Unavailable("it does not answer")
        if self.refuses:
            raise Conflict("it will not")
        self.applied.append(remedy.id)

    def is_done(self, remedy: Remediation) -> bool:
        self.pending -= remedy.id in self.applied
        return remedy.id in self.applied and self.pending < 0

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        return {}

    def close(self) -> None:
        pass


class Book:
    """Stands for the loop's transactions: keeps what was written, in order, and what the core was told. ``away``: how
    often nothing is taken at first; ``unsure``: how often after that what was taken is not promised."""

    def __init__(self, away: int = 0, unsure: int = 0) -> None:
        self.written: list[RemediationRow] = []
        self.told: list[RemediationFinished] = []
        self.away = away
        self.unsure = unsure
        self.now = 1000.0
        self.loop: asyncio.AbstractEventLoop

    async def submit(self, stimulus: Callable[[Any, float], None]) -> None:
        self.loop = asyncio.get_running_loop()
        if self.away > 0:
            self.away -= 1
            raise Unavailable("the database is away", 0.0)
        stimulus(self, self.now)
        if self.unsure > 0:
            self.unsure -= 1
            raise Unavailable("the database is away, so this is kept in memory only", 0.0)

    def put_remediation(self, row: RemediationRow) -> None:
        self.written.append(row)

    def handle(self, event: RemediationFinished, _now: float) -> None:
        self.told.append(event)

    def states(self, remedy: str) -> list[str]:
        return [row.state.value for row in self.written if row.id == remedy]


def wanted(
    number: int,
    kind: RemediationKind = RemediationKind.CORDON,
    node: str = "n1",
    at: float = 1.0,
    due: float = 0.0,
    **more: Any,
) -> RemediationRow:
    sentence = "it fell off the bus"
    remedy = Remediation(
        id=f"{node}-a{number}", node=node, kind=kind, sentence=sentence, at=at, trace="t", deadline=due
    )
    row = RemediationRow(
        id=remedy.id,
        node=node,
        kind=kind,
        state=RemediationState.REQUESTED,
        requested_at=float(number),
        doc=msgspec.json.encode(remedy).decode(),
    )
    return msgspec.structs.replace(row, **more)


def run(
    machine: Remediator, book: Book, *rows: RemediationRow, left: Sequence[RemediationRow] = (), **more: Any
) -> None:
    """Everything to its end."""

    async def to_the_end() -> None:
        desk = RemediationExecutor(
            machine, submit=book.submit, now=lambda: book.now, uniform=lambda: 0.0, rows=left, backoff=AT_ONCE, **more
        )
        desk.start()
        desk.enqueue(rows)
        async with asyncio.timeout(60):
            while desk.open_count():
                await asyncio.sleep(0)
        await desk.stop()

    asyncio.run(to_the_end())
