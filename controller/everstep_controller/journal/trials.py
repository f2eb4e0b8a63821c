"""Changes of policy, tried on what this controller recorded: also while another one leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import Conflict
from everstep.policy_trials import in_words
from everstep.wire.v1.operator_history import Tried, TryPolicy
from everstep_controller import rulebook
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal.what_if import Trial, WhatIf, tried

MOST_TOLD = 1000


Flush = Callable[[], Awaitable[None]]


async def _nothing_waits() -> None:
    """Who records nothing has nothing to bring to the disk."""


class Trials:
    """One at a time, each in a process of its own: it is long work, and the loop has a fleet to look after.

    Args:
        journal: the directory that is kept, empty for none.
        flush: brings what is being recorded to the disk.
    """

    def __init__(self, journal: str, flush: Flush = _nothing_waits) -> None:
        self._journal = journal
        self._flush = flush
        self._trying = asyncio.Lock()

    async def outcome(self, policy: CorePolicy, wanted: TryPolicy, now: float) -> Tried:
        """What the change to ``policy`` would have done in the ``hours`` up to ``now``.

        Raises what ``flush`` raises, ConfigurationError for a change that cannot be, Conflict where no journal is kept
        or another change is being tried, NotFound where nothing is recorded.
        """
        changed = rulebook.apply(policy, wanted.change)
        if not self._journal:
            raise Conflict("nothing is recorded here: set journal_dir, and try the change on what comes from then on")
        if self._trying.locked():
            raise Conflict("another change is being tried: wait for its outcome")
        async with self._trying:
            await self._flush()
            since = now - wanted.hours * 3600.0
            return _told(await tried(Trial(journal=self._journal, policy=changed, since=since)))


def _told(found: WhatIf) -> Tried:
    told = Tried(
        since=found.since or 0.0,
        events=found.events,
        evictions=found.evictions,
        also=found.also[:MOST_TOLD],
        not_then=found.not_then[:MOST_TOLD],
        gaps=found.gaps[:MOST_TOLD],
        stretches=found.stretches[-MOST_TOLD:],
    )
    return msgspec.structs.replace(told, sentence=in_words(told))
