"""Replay a journal under another policy and compare evictions.

After the first decision that differs, the recorded events no longer fit the replayed state: read them so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from everstep.errors import BY_CODE, Conflict, EverstepError, NotFound, Unavailable
from everstep.parent_process import die_with_parent
from everstep.policy_trial_results import describe_result, evicted_node, newest_per_node, recording_gaps
from everstep.vocabulary import Decision, Verdict
from everstep.wire.v1.operator_history import PolicyTrialRequest, PolicyTrialResult, RecordedSpan
from everstep_controller import rulebook
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import FleetState
from everstep_controller.journal.recorder import segments
from everstep_controller.journal.replay import Recording, ReplayedEvent, replay

MAX_RESULT_ENTRIES = 1000


def replay_with_policy(journal: Path, policy: CorePolicy, since: float) -> PolicyTrialResult:
    """Replay ``journal`` (a directory) from ``since`` on under ``policy``. Raises NotFound if nothing is recorded."""
    found = segments(journal)
    if not found:
        raise NotFound(f"nothing is recorded in {journal}: set journal_dir to record a journal")
    later = sum(int(path.name[:15]) / 1000 > since for path in found)
    reached = found[-later - 1 :]  # the segments that begin later, and the one before them
    counts = _EvictionCounts(since)
    state: FleetState | None = None
    for segment in reached:
        recording = replay(segment, policy, state)
        counts.begin(recording)
        for step in recording.events:
            counts.count(step)
        state = recording.state
        counts.end(state.epoch)
    return counts.result()


class _EvictionCounts:
    def __init__(self, since: float) -> None:
        self._since = since
        self._began: float | None = None
        self._events = 0
        self._now: list[tuple[str, Verdict]] = []
        self._then: list[tuple[str, str]] = []
        self._stretches: list[RecordedSpan] = []
        self._begins_at = self._newest = 0.0

    def begin(self, segment: Recording) -> None:
        self._newest = max(self._newest, segment.begins_at)
        if segment.is_continuation and self._stretches:
            self._begins_at = self._stretches.pop().begins_at
        else:
            self._begins_at = segment.begins_at

    def end(self, epoch: int) -> None:
        self._stretches.append(RecordedSpan(begins_at=self._begins_at, ends_at=self._newest, epoch=epoch))

    def count(self, step: ReplayedEvent) -> None:
        self._newest = step.at
        if step.at < self._since:
            return
        self._began = step.at if self._began is None else self._began
        self._events += 1
        if not step.is_operator_order:
            self._now += [(verdict.node, verdict) for verdict in step.verdicts if verdict.decision is Decision.EVICT]
            self._then += [(evicted_node(line), line) for line in step.recorded if _evicts(line)]

    def result(self) -> PolicyTrialResult:
        now = Counter(node for node, _ in self._now)
        then = Counter(node for node, _ in self._then)
        spans = [
            msgspec.structs.replace(one, begins_at=max(one.begins_at, self._since))
            for one in self._stretches
            if one.ends_at >= self._since
        ]
        result = PolicyTrialResult(
            since=self._began or 0.0,
            events=self._events,
            evictions=len(self._now),
            added_evictions=newest_per_node(self._now, now - then)[:MAX_RESULT_ENTRIES],
            avoided_evictions=newest_per_node(self._then, then - now)[:MAX_RESULT_ENTRIES],
            gaps=recording_gaps(spans)[:MAX_RESULT_ENTRIES],
            spans=tuple(spans[-MAX_RESULT_ENTRIES:]),
        )
        return msgspec.structs.replace(result, sentence=describe_result(result))


def _evicts(line: str) -> bool:
    """Return whether a line of ``describe`` is an evicting verdict."""
    return line.startswith("verdict ") and f"({Decision.EVICT}): " in line


# ---- trial process
# ``python -m everstep_controller.journal.policy_replay PARENT`` reads a TrialRequest from standard input and writes a
# TrialReply to standard output. The process ends with its parent.
#
# A pool of ``multiprocessing`` is unsuitable: if the controller is killed, a worker and its semaphores in ``/dev/shm``
# remain forever.


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the trial process."""

    journal: str  # directory
    policy: CorePolicy
    since: float  # unix seconds


class TrialReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result, or the code and message of an error."""

    result: PolicyTrialResult | None = None
    code: str = ""
    message: str = ""


async def run_trial(trial: TrialRequest) -> PolicyTrialResult:
    """Run a trial in a child process; cancelling ends it. Raises Unavailable, or as ``replay_with_policy``."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode(trial))
    except BaseException:
        process.kill()
        await process.wait()
        raise
    try:
        reply = msgspec.msgpack.decode(output, type=TrialReply)
    except msgspec.DecodeError as error:
        raise Unavailable(f"the trial's process ended with status {process.returncode}: try again") from error
    if reply.result is None:
        raise BY_CODE.get(reply.code, EverstepError)(reply.message)
    return reply.result


# ---- one trial at a time


class PolicyTrialRunner:
    """Runs one trial at a time, each in its own process, because a trial takes long and the event loop is busy.

    ``journal`` is the journal's directory, or empty for none. ``flush`` writes pending journal data to the disk.
    """

    def __init__(self, journal: str, flush: Callable[[], Awaitable[None]] | None = None) -> None:
        self._journal = journal
        self._flush = flush
        self._running = asyncio.Lock()

    async def run(self, policy: CorePolicy, request: PolicyTrialRequest, now: float) -> PolicyTrialResult:
        """Return what the change to ``policy`` would have done in the requested hours up to ``now``.

        Raises ConfigurationError for an invalid change, Conflict without a journal or during another trial, and
        NotFound if nothing is recorded for that time.
        """
        changed = rulebook.apply_change(policy, request.change)
        if not self._journal:
            raise Conflict("no journal is recorded here: set journal_dir, and try the change on later events")
        if self._running.locked():
            raise Conflict("another policy trial is running: wait for its result")
        async with self._running:
            if self._flush is not None:
                await self._flush()
            since = now - request.hours * 3600.0
            return await run_trial(TrialRequest(journal=self._journal, policy=changed, since=since))


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrialRequest)
    try:
        reply = TrialReply(result=replay_with_policy(Path(trial.journal), trial.policy, trial.since))
    except EverstepError as error:
        reply = TrialReply(code=error.code, message=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
