"""Carry out remediations: request each one, read it back, and report its outcome to the core, also across crashes.

A remediation is stored in the transaction that decided it, and stored as started before its first request. A later
controller that finds it started reads it back before it repeats the request. Remediations of one node run in order;
nodes are independent. A remediation that was not started is dropped if a later one makes it pointless. So is a started
cordon or uncordon that is delayed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import msgspec

from everstep.clock import Backoff
from everstep.errors import Conflict, EverstepError, Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import RemediationFinished
from everstep_controller.remediation import remediator as interface
from everstep_controller.remediation.remediator import Remediator, call_guarded
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.store.rows import RemediationRow, RemediationState

log = logging.getLogger(__name__)

THREADS = 8
"""Concurrent calls to external systems."""
PATIENCE_S = {
    RemediationKind.CORDON: 300.0,
    RemediationKind.UNCORDON: 300.0,
    RemediationKind.RESET_GPU: 900.0,
    RemediationKind.REBOOT: 3600.0,
    RemediationKind.REPAIR: 300.0,
}
"""Seconds until an unconfirmed remediation is given up. A reboot waits for the node to be idle, and for its firmware's
memory test. A cordon or uncordon is requested until the external system answers: if it were given up, nothing would
request it again."""
_REPAIR_ACTIONS = frozenset({RemediationKind.RESET_GPU, RemediationKind.REBOOT})
DEADLINE_SHARE = 0.9
"""Share of the core's deadline for a repair action after which it is given up here, before the core gives it up. The
next action is then not requested while this one is still in progress."""
PATIENCE_SHARE = 0.6
"""Maximum share of the deadline after the request; a request is therefore made in the first third or not at all."""
_OPPOSITE = {
    RemediationKind.CORDON: RemediationKind.UNCORDON,
    RemediationKind.UNCORDON: RemediationKind.CORDON,
}
"""Later kinds that make it pointless to continue a started remediation."""
_SUPERSEDED_IF_PENDING_BY = {kind: frozenset({opposite}) for kind, opposite in _OPPOSITE.items()} | dict.fromkeys(
    _REPAIR_ACTIONS, _REPAIR_ACTIONS | {RemediationKind.REPAIR, RemediationKind.UNCORDON}
)
"""Later kinds that make an unstarted remediation pointless: for a cordon the opposite; for a repair action the next
step of the ladder, a person, or the node's return to service. A cordon and its following action coexist, and every
repair is reported."""
NVML_CLOSE_S = 5.0
"""Seconds between the decision to reset a GPU and the request. The node's agent was told to close NVML, which blocks
the reset, and takes two seconds."""
NOT_CONFIRMED = "the remediation was not confirmed"
RETRY_BACKOFF = Backoff(floor_s=0.5, ceiling_s=30.0)
"""Delays between attempts, and between checks for completion."""

Submit = Callable[[Callable[[Transaction, float], None]], Awaitable[None]]
"""``FleetLoop.submit``."""


class _Superseded(Exception):
    """A started remediation is not continued."""


@dataclass(eq=False)
class RemediationExecutor:
    """Carries out remediations. Every method belongs to the event loop's thread."""

    remediator: Remediator
    _: KW_ONLY
    submit: Submit  # runs a stimulus in a transaction; durable on return. Raises Unavailable during a database outage
    now: Callable[[], float]
    uniform: Callable[[], float]  # draws from [0, 1), for jitter between attempts
    # Raises Unavailable if this controller is not certain to lead: after a pause, it must not request what another
    # controller has already done.
    check_leading: Callable[[], None] = lambda: None
    # Called for each remediation that failed or exceeded its patience, and for unexpected errors.
    on_failure: Callable[[], None] = lambda: None
    # Called with each task that carries out remediations; a failed task leaves its node's undone.
    on_task: Callable[[asyncio.Task[None]], None] = lambda task: None
    rows: InitVar[Iterable[RemediationRow]] = ()  # stored remediations that have not ended
    backoff: Backoff = RETRY_BACKOFF
    # Seconds, by kind, until an unconfirmed remediation is given up.
    patience_s: Mapping[RemediationKind, float] = field(default_factory=lambda: PATIENCE_S)
    # Seconds before the request to reset a GPU.
    nvml_close_s: float = NVML_CLOSE_S

    def __post_init__(self, rows: Iterable[RemediationRow]) -> None:
        self._queues: dict[str, deque[RemediationRow]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="remediation")
        self._unfinished = sorted(rows, key=_sort_key)

    def start(self) -> None:
        """Continue the remediations that an earlier controller left."""
        self.enqueue(self._unfinished)
        self._unfinished = []

    def enqueue(self, rows: Iterable[RemediationRow]) -> None:
        """Queue remediations that have just become durable, in order."""
        for row in rows:
            self._queues.setdefault(row.node, deque()).append(row)
            if row.node not in self._workers:
                worker = asyncio.create_task(self._work(row.node), name=f"remediations of {row.node}")
                self._workers[row.node] = worker
                self.on_task(worker)

    def open_count(self) -> int:
        """Return the number of remediations that have not ended."""
        return sum(len(queue) for queue in self._queues.values())

    def is_idle(self, node: str) -> bool:
        """Return whether no remediation of the node is queued or in progress."""
        return node not in self._workers

    async def stop(self) -> None:
        """Stop, and leave unfinished remediations to the next controller."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.remediator.close()

    # --- one node

    async def _work(self, node: str) -> None:
        queue = self._queues[node]
        try:
            while queue:
                await self._carry_out(queue[0], later=_superseded_by(queue))
                queue.popleft()
        finally:
            del self._queues[node], self._workers[node]

    async def _carry_out(self, row: RemediationRow, *, later: RemediationRow | None) -> None:
        if later is not None:
            await self._end(
                row, RemediationState.SUPERSEDED, f"{later.id} ({later.kind}) replaced it before it was started"
            )
            return
        remediation = msgspec.json.decode(row.doc, type=Remediation)
        was_started = row.state is RemediationState.STARTED
        if not was_started:
            row = msgspec.structs.replace(row, state=RemediationState.STARTED)
            await self._write(row)
        try:
            failure = await self._apply_until_done(remediation, check_first=was_started)
        except _Superseded as overtaken:
            await self._end(row, RemediationState.SUPERSEDED, str(overtaken))
            return
        if failure:
            self._log_failure(remediation, f"failed: {failure}")
        await self._end(row, RemediationState.FAILED if failure else RemediationState.CONFIRMED, failure)

    async def _apply_until_done(self, remediation: Remediation, *, check_first: bool) -> str:
        """Repeat until done. Return "" or the reason for giving up. Raises _Superseded."""
        if remediation.kind not in self.remediator.kinds:
            return f"{self.remediator.name} cannot {remediation.kind.replace('_', ' ')}"
        if remediation.kind is RemediationKind.RESET_GPU and not (check_first or self.remediator.dry_run):
            await asyncio.sleep(self.nvml_close_s)
        patience_s = self.patience_s[remediation.kind]
        end = request_until = math.inf
        if remediation.deadline:
            waits_s = remediation.deadline - remediation.at
            patience_s, end = min(patience_s, PATIENCE_SHARE * waits_s), remediation.at + DEADLINE_SHARE * waits_s
            request_until = end - patience_s
        until = min(self.now() + patience_s, end)
        wants_request, requested, attempt, failure = not check_first, False, 0, NOT_CONFIRMED
        is_unavailable = is_unfinished = False
        while True:
            later = self._superseding_row(remediation, is_unfinished=is_unfinished) if attempt else None
            try:
                if later is not None:
                    wants_request = False
                if wants_request and self.now() > request_until:
                    if not requested:
                        return "skipped: the next action is due before this one could complete"
                    wants_request = False  # a request whose answer was lost may have been accepted
                if wants_request:
                    requested = True
                    if remediation.deadline:  # the patience begins with the request
                        until = min(self.now() + patience_s, end)
                    await self._in_thread(self.remediator.apply, remediation)
                    wants_request = False
                if await self._in_thread(self.remediator.is_done, remediation):
                    return ""
                # An earlier controller may have died before its request.
                wants_request, check_first = check_first, False
                is_unfinished = False
            except Conflict as error:
                return str(error)
            except Unavailable as error:
                if isinstance(error, interface.UnexpectedFailure):
                    self.on_failure()
                failure, is_unavailable, is_unfinished = (
                    str(error),
                    True,
                    isinstance(error, interface.RemediationIncomplete),
                )
            else:
                # Patience counts only while the external system answers.
                if is_unavailable and remediation.kind not in _REPAIR_ACTIONS:
                    until = self.now() + patience_s
                failure, is_unavailable = NOT_CONFIRMED, False
            if later is not None:
                raise _Superseded(f"{later.id} ({later.kind}) replaced it while it was delayed: {failure}")
            if self.now() >= until:
                late = f"{failure} within {patience_s:g} s"
                if not is_unavailable or remediation.kind in _REPAIR_ACTIONS:
                    return late
                self._log_failure(remediation, f"is requested again: {late}")
                until = self.now() + patience_s
            await asyncio.sleep(self.backoff.delay_s(attempt, self.uniform()))
            attempt += 1

    def _superseding_row(self, remediation: Remediation, *, is_unfinished: bool) -> RemediationRow | None:
        """Return the queued remediation that makes it pointless to continue the started ``remediation``, or None."""
        stronger = {_OPPOSITE.get(remediation.kind)}
        if is_unfinished and remediation.kind is RemediationKind.CORDON:
            stronger.add(RemediationKind.REPAIR)  # it keeps the node out of service as well
        queue = self._queues[remediation.node]
        return next((row for row in queue if row.id != remediation.id and row.kind in stronger), None)

    def _log_failure(self, remediation: Remediation, action: str) -> None:
        self.on_failure()
        extra = {"node": remediation.node, "trace": remediation.trace}
        log.error("%s of node %s %s", remediation.kind, remediation.node, action, extra=extra)

    async def _in_thread(self, call: Callable[[Remediation], Any], remediation: Remediation) -> Any:
        """Run ``call`` in a thread. Raises NotLeadingError if the lease has ended before a thread is free."""

        def called() -> Any:
            self.check_leading()
            return call_guarded(call, remediation)

        return await asyncio.get_running_loop().run_in_executor(self._threads, called)

    async def _end(self, row: RemediationRow, state: RemediationState, detail: str) -> None:
        dry_run = self.remediator.dry_run and state is RemediationState.CONFIRMED
        detail = detail or ("dry run: nothing was done" if dry_run else "")
        ended = msgspec.structs.replace(row, state=state, detail=detail[:1024], ended_at=self.now())
        report = None
        if state is not RemediationState.SUPERSEDED or row.kind in _REPAIR_ACTIONS:  # the core waits for the latter
            trace = msgspec.json.decode(row.doc, type=Remediation).trace
            ok = state is RemediationState.CONFIRMED
            report = RemediationFinished(
                remediation_id=row.id, node=row.node, succeeded=ok, detail=detail[:1024], dry_run=dry_run, trace=trace
            )
        await self._write(ended, report)

    async def _write(self, row: RemediationRow, report: RemediationFinished | None = None) -> None:
        """Make a remediation's new state and its consequences in the core durable; wait during a database outage."""

        taken = False

        def stimulus(tx: Transaction, now: float) -> None:
            nonlocal taken
            if taken:  # by a transaction that waits for the database, and is written before this one
                return
            tx.put_remediation(row)
            if report is not None:
                tx.handle(report, now)
            taken = True

        attempt = 0
        while True:
            try:
                await self.submit(stimulus)
                return
            except Unavailable as error:
                delay_s = max(error.retry_after_s, self.backoff.delay_s(attempt, self.uniform()))
                await asyncio.sleep(min(delay_s, self.backoff.ceiling_s))
                attempt += 1
            except EverstepError as error:  # the node was deleted, so no record can take the outcome
                log.warning("the outcome of remediation %s could not be recorded: %s", row.id, error)
                return


def _superseded_by(queue: deque[RemediationRow]) -> RemediationRow | None:
    """Return the remediation in ``queue`` that makes its first one pointless, or None."""
    first, *rest = queue
    if first.state is not RemediationState.REQUESTED:
        return None
    stronger = _SUPERSEDED_IF_PENDING_BY.get(RemediationKind(first.kind), frozenset())
    return next((row for row in rest if row.kind in stronger), None)


def _sort_key(row: RemediationRow) -> tuple[float, list[int]]:
    """Return the order of decisions; within one time by the numbers in the ids, so that 10 follows 9."""
    return row.requested_at, [int(digits) for digits in re.findall(r"\d+", row.id)]
