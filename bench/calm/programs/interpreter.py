"""C calls that take seconds: with Python's lock, so that no other thread of the rank runs, and without it."""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import random
import time
from collections.abc import Callable
from functools import partial

import everstep
from bench.calm.program import Diary, pace
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.programs.lone_work import work_alone

ITERATIONS_OF_A_TRY = 200_000


def size(of_whole: int) -> int:
    """Return how many objects to take: few where nothing is to take long."""
    return of_whole if pace() else 1000


def numbers(count: int) -> list[float]:
    """Return random numbers, without a change of the run's own generator."""
    draw = random.Random(1)
    return [draw.random() for _ in range(count)]


def do_alone(run: everstep.Run, diary: Diary, prepare: Callable[[], Callable[[], object]]) -> None:
    """Prepare on rank 0 before training, and make the call at steps 30 and 60."""
    call = prepare() if run.rank == 0 else lambda: None
    work_alone(run, diary, "call", 70, call)


@CATALOGUE.add("Rank 0 sorts 5 million floats: one call that holds the lock.", effects={"call": 2})
def sorting_holds_the_lock(run: everstep.Run, diary: Diary) -> None:
    do_alone(run, diary, lambda: partial(sorted, numbers(size(5_000_000))))


@CATALOGUE.add("Rank 0 unpickles 2.5 million small lists.", effects={"call": 2})
def unpickling_holds_the_lock(run: everstep.Run, diary: Diary) -> None:
    do_alone(run, diary, lambda: partial(pickle.loads, pickle.dumps([[float(n)] for n in range(size(2_500_000))])))


@CATALOGUE.add("Rank 0 writes 4 million numbers as JSON.", effects={"call": 2})
def json_holds_the_lock(run: everstep.Run, diary: Diary) -> None:
    do_alone(run, diary, lambda: partial(json.dumps, numbers(size(4_000_000))))


@CATALOGUE.add("Rank 0 collects garbage among 6 million objects.", effects={"call": 2})
def garbage_collection(run: everstep.Run, diary: Diary) -> None:
    def prepare() -> Callable[[], object]:
        objects = [[number] for number in range(size(6_000_000))]
        return lambda: (gc.collect(), gc.collect(), len(objects))

    do_alone(run, diary, prepare)


@CATALOGUE.add("Rank 0 fits a model in one C call of about 6 s that releases the lock.", effects={"call": 2})
def long_call_without_the_lock(run: everstep.Run, diary: Diary) -> None:
    def derive(iterations: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", iterations)

    def prepare() -> Callable[[], object]:
        began = time.monotonic()
        derive(ITERATIONS_OF_A_TRY)
        per_second = ITERATIONS_OF_A_TRY / (time.monotonic() - began)
        return lambda: derive(max(1, int(6 * pace() * per_second)))

    do_alone(run, diary, prepare)
