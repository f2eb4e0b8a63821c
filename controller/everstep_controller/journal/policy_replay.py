"""Replay a journal under another policy and compare evictions (see ``replay`` for what follows a difference)."""

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
from everstep.host.parent_process import die_with_parent
from everstep.policy_trial_results import describe_result, evicted_node, newest_per_node, recording_gaps
from everstep.vocabulary import Decision, Verdict
from everstep.wire.v1.operator_history import PolicyTrialRequest, PolicyTrialResult, RecordedSpan
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import FleetState
from everstep_controller.journal.recorder import segments
from everstep_controller.journal.replay import replay
from everstep_controller.policy import rulebook

MAX_RESULT_ENTRIES = 1000


def replay_with_policy(journal: Path, policy: CorePolicy, since: float) -> PolicyTrialResult:
    """Replay ``journal`` (a directory) from ``since`` on under ``policy``. Raises NotFound if nothing is recorded."""
    found = segments(journal)
    if not found:
        raise NotFound(f"nothing is recorded in {journal}: set journal_dir to record a journal")
    later = sum(int(path.name[:15]) / 1000 > since for path in found)
    events, began, newest = 0, None, 0.0
    now: list[tuple[str, Verdict]] = []
    then: list[tuple[str, str]] = []
    spans: list[RecordedSpan] = []
    state: FleetState | None = None
    for path in found[-later - 1 :]:  # the segments that begin later, and the one before them
        segment = replay(path, policy, state)
        newest = max(newest, segment.begins_at)
        begins_at = spans.pop().begins_at if segment.is_continuation and spans else segment.begins_at
        for step in segment.events:
            newest = step.at
            if step.at < since:
                continue
            began = step.at if began is None else began
            events += 1
            if not step.is_operator_order:
                now += [(verdict.node, verdict) for verdict in step.verdicts if verdict.decision is Decision.EVICT]
                then += [(evicted_node(line), line) for line in step.recorded if _evicts(line)]
        state = segment.state
        spans.append(RecordedSpan(begins_at=begins_at, ends_at=newest, epoch=state.epoch))
    spans = [
        msgspec.structs.replace(span, begins_at=max(span.begins_at, since)) for span in spans if span.ends_at >= since
    ]
    counts_now, counts_then = Counter(node for node, _ in now), Counter(node for node, _ in then)
    result = PolicyTrialResult(
        since=began or 0.0,
        events=events,
        evictions=len(now),
        added_evictions=newest_per_node(now, counts_now - counts_then)[:MAX_RESULT_ENTRIES],
        avoided_evictions=newest_per_node(then, counts_then - counts_now)[:MAX_RESULT_ENTRIES],
        gaps=recording_gaps(spans)[:MAX_RESULT_ENTRIES],
        spans=tuple(spans[-MAX_RESULT_ENTRIES:]),
    )
    return msgspec.structs.replace(result, sentence=describe_result(result))


def _evicts(line: str) -> bool:
    """Return whether a line of ``describe`` is an evicting verdict."""
    return line.startswith("verdict ") and f"({Decision.EVICT}): " in line


# ``python -m everstep_controller.journal.policy_replay PARENT`` reads the arguments of ``replay_with_policy`` from
# standard input and writes a TrialReply to standard output. The process ends with its parent.
#
# A pool of ``multiprocessing`` is unsuitable: if the controller is killed, a worker and its semaphores in ``/dev/shm``
# remain forever.


class TrialReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result, or the code and message of an error."""

    result: PolicyTrialResult | None = None
    code: str = ""
    message: str = ""


async def run_trial(journal: str, policy: CorePolicy, since: float) -> PolicyTrialResult:
    """Run ``replay_with_policy`` in a child process; cancelling ends it. Raises Unavailable also."""
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode((journal, policy, since)))
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


class PolicyTrialRunner:
    """Runs one trial at a time, each in its own process; ``journal`` is a directory, or empty for none."""

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
            return await run_trial(self._journal, changed, since)


def main() -> None:
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    journal, policy, since = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[str, CorePolicy, float])
    try:
        reply = TrialReply(result=replay_with_policy(Path(journal), policy, since))
    except EverstepError as error:
        reply = TrialReply(code=error.code, message=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
