"""Changes of policy, tried on what this controller recorded: also while another one leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import Conflict
from everstep.policy_trials import describe_result
from everstep.wire.v1.operator_history import PolicyTrialRequest, PolicyTrialResult
from everstep_controller import rulebook
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.what_if import PolicyTrialOutcome, TrialRequest, run_trial

MAX_RESULT_ENTRIES = 1000


Flush = Callable[[], Awaitable[None]]


async def _flush_nothing() -> None:
    """Who records nothing has nothing to bring to the disk."""


class PolicyTrialRunner:
    """One at a time, each in a process of its own: it is long work, and the loop has a fleet to look after.

    Args:
        journal: the directory that is kept, empty for none.
        flush: brings what is being recorded to the disk.
    """

    def __init__(self, journal: str, flush: Flush = _flush_nothing) -> None:
        self._journal = journal
        self._flush = flush
        self._trying = asyncio.Lock()

    async def run(self, policy: CorePolicy, request: PolicyTrialRequest, now: float) -> PolicyTrialResult:
        """What the change to ``policy`` would have done in the ``hours`` up to ``now``.

        Raises what ``flush`` raises, ConfigurationError for a change that cannot be, Conflict where no journal is kept
        or another change is being tried, NotFound where nothing is recorded.
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
        spans=found.spans[-MAX_RESULT_ENTRIES:],
    )
    return msgspec.structs.replace(told, sentence=describe_result(told))
