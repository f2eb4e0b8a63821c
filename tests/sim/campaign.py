"""Play many worlds on many cores, and print each failure with its smallest set of faults and its replay command."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.faults.plan import Plan, make_plan
from tests.sim.minimize import smallest_plan
from tests.sim.run import Outcome, play

MAX_REPORTED = 5
"""Number of failures that are reduced and printed in full. Of the others only the seed and the checker are printed."""


@dataclass(frozen=True)
class Failure:
    """A seed's broken promise, and the smallest set of faults found that breaks it."""

    outcome: Outcome
    plan: Plan

    @property
    def command(self) -> str:
        faults = ",".join(str(number) for number, _ in self.plan.faults)
        return f"python -m tests.sim --seed {self.plan.seed} --faults {faults or 'none'} --trace"

    def __str__(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.outcome.sentence}", "faults that are sufficient:"]
        lines += [f"  {number:3} {fault}" for number, fault in self.plan.faults] or ["  none"]
        return "\n".join([*lines, f"replay: {self.command}"])


def play_seed(seed: int) -> Outcome:
    """Play the world of a seed."""
    logging.disable(logging.CRITICAL)
    return play(make_plan(seed))


def reduce_failure(seed: int, checker: str) -> Failure:
    """Return the failure of a seed with the smallest set of faults that ``checker`` still reports."""
    plan = smallest_plan(make_plan(seed), lambda candidate: play(candidate).checker == checker)
    return Failure(play(plan), plan)


def outcomes(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each seed when it is known."""
    if jobs == 1:
        yield from map(play_seed, seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs) as pool:
        yield from pool.imap_unordered(play_seed, seeds, chunksize=4)


def campaign(first: int, count: int, jobs: int = 0) -> int:
    """Play ``count`` seeds from ``first`` on, and return the exit status."""
    logging.disable(logging.CRITICAL)
    console = Console(stderr=True)
    failed: list[Outcome] = []
    virtual_s = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("worlds", total=count)
        for outcome in outcomes(range(first, first + count), jobs or os.cpu_count() or 1):
            progress.advance(task)
            virtual_s += outcome.virtual_s
            if outcome.checker:
                failed.append(outcome)
                progress.update(task, description=f"worlds, {len(failed)} broken")
    print(f"{count} worlds, {virtual_s / 3600:.1f} hours of their time, {len(failed)} broken promises")
    for outcome in sorted(failed, key=lambda outcome: outcome.seed)[:MAX_REPORTED]:
        print()
        print(reduce_failure(outcome.seed, outcome.checker))
    if len(failed) > MAX_REPORTED:
        rest = ", ".join(
            f"{outcome.seed} ({outcome.checker})"
            for outcome in sorted(failed, key=lambda outcome: outcome.seed)[MAX_REPORTED:]
        )
        print(f"\nand: {rest}")
    return 1 if failed else 0
