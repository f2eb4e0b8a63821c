"""Many seeds on many cores, with a bar; each failure is shortened and told with the command that plays it again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.minimize import shortest
from tests.sim.plan import Plan, make
from tests.sim.run import Outcome, play

TOLD = 5
"""Failures that are shortened and told in full; more of them are only counted."""


@dataclass(frozen=True)
class Failure:
    """A seed's broken promise, and the fewest faults that were found to break it."""

    outcome: Outcome
    plan: Plan

    @property
    def command(self) -> str:
        faults = ",".join(str(place) for place, _ in self.plan.faults)
        return f"python -m tests.sim --seed {self.plan.seed} --faults {faults or 'none'} --trace"

    def __str__(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.outcome.sentence}", "faults that are enough:"]
        lines += [f"  {place:3} {fault}" for place, fault in self.plan.faults] or ["  none"]
        return "\n".join([*lines, f"replay: {self.command}"])


def play_seed(seed: int) -> Outcome:
    """One world, in a process of the pool."""
    logging.disable(logging.CRITICAL)
    return play(make(seed))


def shorten(seed: int, checker: str) -> Failure:
    """The failure of a seed with the fewest faults that keep ``checker`` complaining."""
    plan = shortest(make(seed), lambda candidate: play(candidate).checker == checker)
    return Failure(play(plan), plan)


def outcomes(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Each seed's outcome, as they come."""
    if jobs == 1:
        yield from map(play_seed, seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs) as pool:
        yield from pool.imap_unordered(play_seed, seeds, chunksize=4)


def campaign(first: int, count: int, jobs: int = 0) -> int:
    """Plays ``count`` seeds from ``first`` on; the exit status."""
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
    for outcome in sorted(failed, key=lambda o: o.seed)[:TOLD]:
        print()
        print(shorten(outcome.seed, outcome.checker))
    if len(failed) > TOLD:
        rest = ", ".join(f"{o.seed} ({o.checker})" for o in sorted(failed, key=lambda o: o.seed)[TOLD:])
        print(f"\nand: {rest}")
    return 1 if failed else 0
