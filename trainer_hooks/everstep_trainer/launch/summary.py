"""Say at the end of a run how far it came, what failed and what that cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everstep.cli.client import Client, path, read_token
from everstep.errors import EverstepError
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.operator import JobDetail, Recovery

MOST_LISTED = 20
"""Recoveries that are listed one by one, the newest; all that the controller tells of are counted."""
LONGEST_REASON = 160
"""Characters of a recovery's sentence."""


async def read_detail(url: str, token_file: Path, job: str) -> JobDetail | None:
    """Ask a controller about a job; None where it does not answer or knows no such job."""

    def ask() -> JobDetail:
        return Client(url, read_token(str(token_file))).get(path("jobs", job), JobDetail)

    try:
        return await asyncio.to_thread(ask)
    except EverstepError:
        return None


def summary(detail: JobDetail) -> list[str]:
    """Return the lines for people: steps, recoveries with the seconds of each, and seconds lost in all.

    A run loses the time from a decision to regroup until the last rank has finished its first step after it.
    """
    job = detail.summary
    recoveries = [one for one in detail.recoveries if one.reason is not GenerationReason.FORMED]
    lost_s = sum(one.seconds or 0.0 for one in recoveries)
    counted = f"{len(recoveries)} recover{'y' if len(recoveries) == 1 else 'ies'}"
    over = "finished" if job.state is JobState.FINISHED else str(job.state)
    lines = [f"job {job.job} {over} at step {job.step}: {counted}, {lost_s:.2f} s lost to them"]
    if len(recoveries) > MOST_LISTED:
        lines.append(f"  the last {MOST_LISTED} of them:")
    return lines + [_line(one) for one in recoveries[-MOST_LISTED:]]


def _line(one: Recovery) -> str:
    took = "not completed" if one.seconds is None else f"{one.seconds:.2f} s"
    reason = " ".join(one.sentence.split())
    if len(reason) > LONGEST_REASON:
        reason = reason[: LONGEST_REASON - 3] + "..."
    return f"  generation {one.generation}: {took}, {one.reason}: {reason}"
