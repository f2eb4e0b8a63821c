"""Try policy changes on this controller's journal, also while another controller leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import Conflict
from everstep.policy_trial_results import describe_result
from everstep.wire.v1.operator_history import PolicyTrialRequest, PolicyTrialResult
from everstep_controller import rulebook
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.policy_replay import PolicyTrialOutcome, TrialRequest, run_trial

MAX_RESULT_ENTRIES = 1000


Flush = Callable[[], Awaitable[None]]


async def _flush_nothing() -> None:
    """Do nothing: without a journal there is no data to flush."""


class PolicyTrialRunner:
    """Runs one trial at a time, each in its own process, because a trial takes long and the event loop is busy.

    ``journal`` is the journal's directory, or empty for none. ``flush`` writes pending journal data to the disk.
    """

    def __init__(self, journal: str, flush: Flush = _flush_nothing) -> None:
        self._journal = journal
        self._flush = flush
        self._trying = asyncio.Lock()

    async def run(self, policy: CorePolicy, request: PolicyTrialRequest, now: float) -> PolicyTrialResult:
        """Return what the change to ``policy`` would have done in the requested hours up to ``now``.

        Raises ConfigurationError for an invalid change, Conflict without a journal or during another trial, and
        NotFound if nothing is recorded for that time.
        """
        changed = rulebook.apply_change(policy, request.change)
        if not self._journal:
            raise Conflict("nothing is recorded here: set journal_dir, and try the change on what comes from then on")
        if self._trying.locked():
            raise Conflict("another change is being tried: wait for its outcome")
        async with self._trying:
            await self._flush()
            since = now - request.hours * 3600.0
            return _to_message(await run_trial(TrialRequest(journal=self._journal, policy=changed, since=since)))


def _to_message(found: PolicyTrialOutcome) -> PolicyTrialResult:
    told = PolicyTrialResult(
        since=found.since or 0.0,
        events=found.events,
        evictions=found.evictions,
        added_evictions=found.added_evictions[:MAX_RESULT_ENTRIES],
        avoided_evictions=found.avoided_evictions[:MAX_RESULT_ENTRIES],
        gaps=found.gaps[:MAX_RESULT_ENTRIES],
        spans=found.recorded_spans[-MAX_RESULT_ENTRIES:],
    )
    return msgspec.structs.replace(told, sentence=describe_result(told))
