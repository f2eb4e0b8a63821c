"""Remedies on their way: each is asked for, read back, and its outcome told to the core; across crashes, once.

A remedy is stored in the transaction that decided it. Before it is first asked for it is stored as begun, so that the
next life of a controller, finding it begun, reads back before it asks again. Remedies of one node follow one another;
different nodes do not wait for each other. One that was not begun is dropped where a later one makes it pointless, and
so is a cordon, or the end of one, that was begun and is held up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from everstep.clock import Backoff
from everstep.errors import Conflict, EverstepError, Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import RemediationFinished
from everstep_controller.remediation.remediator import PartiallyDone, Remediator, UnexpectedFailure, call_guarded
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.store.rows import RemediationRow, RemediationState

log = logging.getLogger(__name__)

THREADS = 8
"""Calls to the outside at once."""
PATIENCE_S = {
    RemediationKind.CORDON: 300.0,
    RemediationKind.UNCORDON: 300.0,
    RemediationKind.RESET_GPU: 900.0,
    RemediationKind.REBOOT: 3600.0,
    RemediationKind.REPAIR: 300.0,
}
"""Seconds until a remedy that was not confirmed is given up. A reboot waits for the node to be idle, and for its
firmware's memory test. What is to stand, a cordon or a node's return, is asked for until the outside answers: given up,
it would stay as it is, and nobody would ask again."""
_REPAIR_ACTIONS = frozenset({RemediationKind.RESET_GPU, RemediationKind.REBOOT})
DEADLINE_SHARE = 0.9
"""Of the time that the core waits for a cure: it is given up here before it is given up there, so that the next one is
not asked for while somebody works at it."""
PATIENCE_SHARE = 0.6
"""Of that time, at most, once it was asked for; so it is asked for in the first third of it or not at all."""
_SUPERSEDED_IF_PENDING_BY = {
    RemediationKind.CORDON: frozenset({RemediationKind.UNCORDON}),
    RemediationKind.UNCORDON: frozenset({RemediationKind.CORDON}),
    **dict.fromkeys(_REPAIR_ACTIONS, _REPAIR_ACTIONS | {RemediationKind.REPAIR, RemediationKind.UNCORDON}),
}
"""What makes a remedy pointless that was not begun: of cordons the opposite, of a cure the next step of the ladder, a
person, or that the node serves again. A cordon stands beside the cure that follows it, and every repair is told."""
_SUPERSEDED_IF_STARTED_BY = {
    RemediationKind.CORDON: frozenset({RemediationKind.UNCORDON}),
    RemediationKind.UNCORDON: frozenset({RemediationKind.CORDON}),
}
"""What makes it pointless to go on with what was begun: the opposite stands behind it."""
_SUPERSEDED_IF_PARTIAL_BY = {RemediationKind.CORDON: frozenset({RemediationKind.REPAIR})}
"""The same where it stands outside but for something that goes with it: a repair keeps the node out as well."""
NOT_CONFIRMED = "it was not confirmed"
RETRY_BACKOFF = Backoff(floor_s=0.5, ceiling_s=30.0)
"""Between two attempts, and between two looks at whether it is done."""

Submit = Callable[[Callable[[Transaction, float], None]], Awaitable[None]]
"""``FleetLoop.submit``."""


class _Superseded(Exception):
    """A remedy that was begun is not gone on with."""


class RemediationExecutor:
    """Carries remedies out. Every method belongs to the event loop's thread.

    Args:
        submit: runs a stimulus in a transaction; durable on return. Raises Unavailable while the database is away.
        now: wall seconds, as decisions are dated.
        uniform: draws from [0, 1), for the jitter between attempts.
        check_leading: raises Unavailable where this controller may not be sure that it leads: one that was stopped, and
            wakes, must not ask for what another has had done meanwhile.
        failed: called for each remedy that is given up, or waits for an outside that was away for longer than patience,
            and for each call that failed unexpectedly.
        watch: told of each task that carries remedies out; one that fails leaves its node's undone.
        rows: what was stored and has not ended.
        patience_s: seconds, by kind, until a remedy that was not confirmed is given up.
    """

    def __init__(
        self,
        remediator: Remediator,
        *,
        submit: Submit,
        now: Callable[[], float],
        uniform: Callable[[], float],
        check_leading: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
        on_task: Callable[[asyncio.Task[None]], None] = lambda task: None,
        rows: Iterable[RemediationRow] = (),
        backoff: Backoff = RETRY_BACKOFF,
        patience_s: Mapping[RemediationKind, float] = PATIENCE_S,
    ) -> None:
        self._remediator = remediator
        self._submit = submit
        self._now = now
        self._uniform = uniform
        self._check_leading = check_leading
        self._failed = on_failure
        self._watch = on_task
        self._backoff = backoff
        self._patience_s = patience_s
        self._queues: dict[str, deque[RemediationRow]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="remedy")
        self._unfinished = sorted(rows, key=_place)

    def start(self) -> None:
        """Goes on with what an earlier life left."""
        self.enqueue(self._unfinished)
        self._unfinished = []

    def enqueue(self, rows: Iterable[RemediationRow]) -> None:
        """Remedies that have just become durable, in order."""
        for row in rows:
            self._queues.setdefault(row.node, deque()).append(row)
            if row.node not in self._workers:
                worker = asyncio.get_running_loop().create_task(self._work(row.node), name=f"remedies of {row.node}")
                self._workers[row.node] = worker
                self._watch(worker)

    def open_count(self) -> int:
        """Remedies that have not ended."""
        return sum(len(queue) for queue in self._queues.values())

    def is_idle(self, node: str) -> bool:
        """Whether nothing is asked for, or about to be, at the node."""
        return node not in self._workers

    async def stop(self) -> None:
        """Leaves what is under way to the next life."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._remediator.close()

    # --- one node ------------------------------------------------------------------------------------------------

    async def _work(self, node: str) -> None:
        queue = self._queues[node]
        try:
            while queue:
                await self._carry_out(queue[0], later=_replaced_by(queue))
                queue.popleft()
        finally:
            del self._queues[node], self._workers[node]

    async def _carry_out(self, row: RemediationRow, *, later: RemediationRow | None) -> None:
        if later is not None:
            await self._end(
                row, RemediationState.SUPERSEDED, f"{later.id} ({later.kind}) replaced it before it was begun"
            )
            return
        remedy = msgspec.json.decode(row.doc, type=Remediation)
        begun_before = row.state is RemediationState.STARTED
        if not begun_before:
            row = msgspec.structs.replace(row, state=RemediationState.STARTED)
            await self._write(row)
        try:
            trouble = await self._apply_until_done(remedy, look_first=begun_before)
        except _Superseded as overtaken:
            await self._end(row, RemediationState.SUPERSEDED, str(overtaken))
            return
        if trouble:
            self._log_failure(remedy, f"was given up: {trouble}")
        await self._end(row, RemediationState.FAILED if trouble else RemediationState.CONFIRMED, trouble)

    async def _apply_until_done(self, remedy: Remediation, *, look_first: bool) -> str:
        """Asks until it is done; why it was given up, or nothing. Raises _Overtaken."""
        if remedy.kind not in self._remediator.kinds:
            return f"{self._remediator.name} cannot {remedy.kind.replace('_', ' ')}"
        patience_s = self._patience_s[remedy.kind]
        end = ask_until = math.inf
        if remedy.deadline:
            waits_s = remedy.deadline - remedy.at
            patience_s, end = min(patience_s, PATIENCE_SHARE * waits_s), remedy.at + DEADLINE_SHARE * waits_s
            ask_until = end - patience_s
        until = min(self._now() + patience_s, end)
        ask, asked, attempt, trouble = not look_first, False, 0, NOT_CONFIRMED
        is_away = is_unfinished = False
        while True:
            later = self._superseding_row(remedy, is_unfinished=is_unfinished) if attempt else None
            try:
                if later is not None:
                    ask = False
                if ask and self._now() > ask_until:
                    if not asked:
                        return "it is too late to ask for it: the next step is due before it could be done"
                    ask = False  # an order whose answer was lost may have been taken
                if ask:
                    asked = True
                    if (
                        remedy.deadline
                    ):  # it may take as long from here on: nobody hears that it is given up before that
                        until = min(self._now() + patience_s, end)
                    await self._in_thread(self._remediator.apply, remedy)
                    ask = False
                if await self._in_thread(self._remediator.is_done, remedy):
                    return ""
                ask, look_first = look_first, False  # an earlier life may have died before it asked
                is_unfinished = False
            except Conflict as error:
                return str(error)
            except Unavailable as error:
                if isinstance(error, UnexpectedFailure):
                    self._failed()
                trouble, is_away, is_unfinished = str(error), True, isinstance(error, PartiallyDone)
            else:
                if is_away and remedy.kind not in _REPAIR_ACTIONS:  # patience is with an outside that answers
                    until = self._now() + patience_s
                trouble, is_away = NOT_CONFIRMED, False
            if later is not None:
                raise _Superseded(f"{later.id} ({later.kind}) replaced it while it was held up: {trouble}")
            if self._now() >= until:
                late = f"{trouble} within {patience_s:g} s"
                if not is_away or remedy.kind in _REPAIR_ACTIONS:
                    return late
                self._log_failure(remedy, f"is asked for again: {late}")
                until = self._now() + patience_s
            await asyncio.sleep(self._backoff.delay_s(attempt, self._uniform()))
            attempt += 1

    def _superseding_row(self, remedy: Remediation, *, is_unfinished: bool) -> RemediationRow | None:
        """The remedy behind ``remedy``, which was begun, that makes it pointless to go on with it."""
        to = _SUPERSEDED_IF_STARTED_BY.get(remedy.kind, frozenset[RemediationKind]())
        if is_unfinished:
            to |= _SUPERSEDED_IF_PARTIAL_BY.get(remedy.kind, frozenset())
        return next((row for row in self._queues[remedy.node] if row.id != remedy.id and row.kind in to), None)

    def _log_failure(self, remedy: Remediation, what: str) -> None:
        self._failed()
        extra = {"node": remedy.node, "trace": remedy.trace}
        log.error("%s of node %s %s", remedy.kind, remedy.node, what, extra=extra)

    async def _in_thread(self, call: Callable[[Remediation], Any], remedy: Remediation) -> Any:
        """Runs ``call`` when a thread is free. Raises NotLeading where the lease has ended by then: the next leader may
        have decided otherwise."""

        def called() -> Any:
            self._check_leading()
            return call_guarded(call, remedy)

        return await asyncio.get_running_loop().run_in_executor(self._threads, called)

    async def _end(self, row: RemediationRow, state: RemediationState, detail: str) -> None:
        dry_run = self._remediator.dry_run and state is RemediationState.CONFIRMED
        detail = detail or ("dry run: nothing was done" if dry_run else "")
        ended = msgspec.structs.replace(row, state=state, detail=detail[:1024], ended_at=self._now())
        report = None
        if state is not RemediationState.SUPERSEDED or row.kind in _REPAIR_ACTIONS:  # a cure may be waited for
            trace = msgspec.json.decode(row.doc, type=Remediation).trace
            ok = state is RemediationState.CONFIRMED
            words = detail[:1024]
            report = RemediationFinished(
                remediation_id=row.id, node=row.node, succeeded=ok, detail=words, dry_run=dry_run, trace=trace
            )
        await self._write(ended, report)

    async def _write(self, row: RemediationRow, report: RemediationFinished | None = None) -> None:
        """Makes a remedy's new state durable, with what the core makes of it; waits while the database is away."""

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
                await self._submit(stimulus)
                return
            except Unavailable as error:
                delay_s = max(error.retry_after_s, self._backoff.delay_s(attempt, self._uniform()))
                await asyncio.sleep(min(delay_s, self._backoff.ceiling_s))
                attempt += 1
            except EverstepError as error:  # the node is gone from the records: there is nobody to tell
                log.warning("the outcome of remedy %s was not taken up: %s", row.id, error)
                return


def _replaced_by(queue: deque[RemediationRow]) -> RemediationRow | None:
    """The remedy in ``queue`` that makes its first one pointless."""
    first, *rest = queue
    if first.state is not RemediationState.REQUESTED:
        return None
    stronger = _SUPERSEDED_IF_PENDING_BY.get(RemediationKind(first.kind), frozenset())
    return next((row for row in rest if row.kind in stronger), None)


def _place(row: RemediationRow) -> tuple[float, list[int]]:
    """The order of decisions: those of one moment by the numbers in their ids, of which 10 comes after 9."""
    return row.requested_at, [int(digits) for digits in re.findall(r"\d+", row.id)]
