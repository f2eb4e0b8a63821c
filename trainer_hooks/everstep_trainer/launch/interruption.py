"""End a launcher that received a signal: wait for its checkpoints, and say how to continue."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import msgspec

from everstep.client import Client
from everstep.clock import Clock
from everstep.wire.v1.operator_history import CheckpointCopy, JobCheckpoints

POLL_S = 0.1
"""Seconds between two questions whether the newest version is on storage."""

AskController = Callable[[Callable[[Client], JobCheckpoints]], Awaitable[JobCheckpoints | None]]


class EndingSignals:
    """The signals that end the launcher: the first one in order, the second one at once."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._deliver: Callable[[signal.Signals], None] | None = None
        self._cancel: Callable[[], object] | None = None

    def receive(self, number: signal.Signals) -> None:
        """Handle a signal: pass the first one to the running launcher, or cancel its work."""
        self.received.append(number)
        if len(self.received) == 1 and self._deliver is not None:
            self._deliver(number)
        elif self._cancel is not None:
            self._cancel()

    def cancel_by(self, cancel: Callable[[], object]) -> None:
        """Let a signal that is not delivered call ``cancel``."""
        self._cancel = cancel

    def deliver_to(self, deliver: Callable[[signal.Signals], None] | None) -> None:
        """Deliver the first signal from now on, because there are ranks that may have to save."""
        self._deliver = deliver


class KeptProgress(msgspec.Struct, frozen=True):
    """Where a job's newest versions are when its launcher ends."""

    in_memory: CheckpointCopy | None = None
    on_storage: CheckpointCopy | None = None
    error: str = ""
    """Why the last version was not written to storage; empty if it was."""

    @property
    def is_saved(self) -> bool:
        """True if storage has all that memory has."""
        if self.in_memory is None:
            return True
        return self.on_storage is not None and self.on_storage.version >= self.in_memory.version


def kept_progress(checkpoints: JobCheckpoints) -> KeptProgress:
    """Return the newest complete version of each place."""

    def newest(tier: str) -> CheckpointCopy | None:
        found = (
            version for version in checkpoints.versions if version.storage_tier == tier and version.state == "complete"
        )
        return max(found, key=lambda one: one.version, default=None)

    return KeptProgress(newest("memory"), newest("storage"), checkpoints.last_error)


async def wait_until_saved(ask: AskController, job: str, deadline: float, clock: Clock) -> KeptProgress | None:
    """Wait until the newest committed version is on storage, or the deadline (monotonic) is over.

    Returns:
        What is known then; None if the controller does not answer.
    """
    while True:
        checkpoints = await ask(lambda client: client.job_checkpoints(job))
        if checkpoints is None:
            return None
        kept = kept_progress(checkpoints)
        if kept.is_saved or clock.monotonic() >= deadline:
            return kept
        await asyncio.sleep(POLL_S)


def describe_continuation(kept: KeptProgress | None, *, spill_to: str | None, grace_s: float, command: str) -> str:
    """Return the sentence that says what was saved, and how the job continues.

    Args:
        kept: The newest versions; None if they are not known.
        spill_to: ``--spill-to``, if it was given.
        grace_s: ``--grace-s``.
        command: What to run again, in words.
    """
    if spill_to is None:
        return "its checkpoints were in memory only, and are gone: give --spill-to to keep them"
    if kept is None:
        return f"{command} continues from the newest checkpoint in {spill_to}"
    stored = kept.on_storage
    if stored is None and kept.in_memory is None:
        return f"nothing was committed yet, so {spill_to} has no checkpoint of it"
    saved = "" if stored is None else f"step {stored.version.step} is saved in {stored.url}; {command} continues there"
    if kept.is_saved:
        return saved
    assert kept.in_memory is not None
    why = kept.error or f"it was not written within --grace-s {grace_s:g}"
    lost = f"step {kept.in_memory.version.step} is not saved ({why})"
    return f"{lost}; {saved}" if saved else f"{lost}, and {spill_to} has no earlier checkpoint of it"
