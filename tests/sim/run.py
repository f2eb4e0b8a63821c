"""Play one world under all checkers, and return its outcome."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.sim.checkers.all_checkers import all_checkers
from tests.sim.checkers.checker import Violation
from tests.sim.cluster.world import World
from tests.sim.faults.plan import Plan

MEMORY_DIR = Path("/dev/shm")
"""The directory of the agents' spools if it exists, so that a simulation writes to no disk."""
CRASH = "crash"
"""Stands for the checker's name in an outcome whose error no checker raised."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a world.

    Attributes:
        checker: The checker that detected a broken promise, empty if all promises held. ``CRASH`` for another error.
        sentence: The broken promise or the error.
        virtual_s: Seconds of the world that were played.
        calls: The number of calls that the timeline made.
        logged_kinds: Kinds of the entries that controllers wrote to the event log.
    """

    seed: int
    checker: str
    sentence: str
    virtual_s: float
    calls: int
    logged_kinds: frozenset[str]


@contextmanager
def _seeded_secrets(seed: int) -> Iterator[None]:
    """Draw trace IDs and jobs' secrets from the seed too, so that a world replays identically."""
    rng = random.Random(seed)
    with patch("secrets.token_hex", lambda size=32: f"{rng.getrandbits(8 * size):0{2 * size}x}"):
        yield


def play(plan: Plan, on_trace: Callable[[float, str, str], None] | None = None) -> Outcome:
    """Play one world to its end or to the first broken promise."""
    with tempfile.TemporaryDirectory(
        prefix="everstep-sim-", dir=MEMORY_DIR if MEMORY_DIR.is_dir() else None
    ) as spool_dir:
        checkers = all_checkers()
        world = World(plan, checkers, on_trace=on_trace, spool_dir=Path(spool_dir))
        for checker in checkers:
            checker.world = world
        checker_name = sentence = ""
        try:
            with _seeded_secrets(plan.seed):
                world.run()
        except Violation as violation:
            checker_name, sentence = violation.checker, str(violation)
        except Exception as error:  # noqa: BLE001 - the outcome of this world; every other error is a finding too
            last = traceback.extract_tb(error.__traceback__)[-1]
            checker_name = CRASH
            sentence = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            if on_trace is not None:
                on_trace(world.timeline.now, CRASH, traceback.format_exc())
        finally:
            world.close()
        return Outcome(
            plan.seed,
            checker_name,
            sentence,
            world.timeline.now,
            world.timeline.calls_made,
            frozenset(world.logged_kinds),
        )
