"""Plays one plan under all checkers, and says how it ended."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.sim.checkers.every import all_checkers
from tests.sim.facts import Violation
from tests.sim.plan import Plan
from tests.sim.world import World

MEMORY = Path("/dev/shm")
"""Where agents' spools lie, if it is there: no disk is worn for a simulation."""
CRASH = "crash"
"""In place of a checker's name: an error that no checker names."""


@dataclass(frozen=True)
class Outcome:
    """``checker`` is empty where all promises held; ``crash`` for an error that no checker names. ``seen``: kinds of
    audit lines that controllers wrote."""

    seed: int
    checker: str
    sentence: str
    virtual_s: float
    calls: int
    seen: frozenset[str]


@contextmanager
def _seeded_secrets(seed: int) -> Iterator[None]:
    """Traces and jobs' secrets come from the seed too, so that a world repeats itself to the letter."""
    rng = random.Random(seed)
    with patch("secrets.token_hex", lambda size=32: f"{rng.getrandbits(8 * size):0{2 * size}x}"):
        yield


def play(plan: Plan, on_trace: Callable[[float, str, str], None] | None = None) -> Outcome:
    """One world, to its end or to the first broken promise."""
    with tempfile.TemporaryDirectory(prefix="everstep-sim-", dir=MEMORY if MEMORY.is_dir() else None) as path:
        checkers = all_checkers()
        world = World(plan, checkers, on_trace=on_trace, spool_dir=Path(path))
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
            world.end()
        return Outcome(
            plan.seed, checker_name, sentence, world.timeline.now, world.timeline.played, frozenset(world.seen)
        )
