"""Programs in which a rank really hangs, in generation 1 at step 40."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import everstep
from bench.calm.program import Diary, Program
from bench.calm.training import SmallTraining

HANG_STEP, STEPS = 40, 60
LIMIT_S = 120.0
BOTH = (r"\brank 0\b.*\brank 1\b", r"\brank 1\b.*\brank 0\b", r"\branks 0(, | and |-)1\b")
RANK_1 = (r"\brank 1\b",)


@dataclass(frozen=True)
class Hang:
    """A program that hangs.

    Attributes:
        program: The program.
        names: Patterns of a sentence that names the rank or ranks to blame.
        floor_s: Seconds within which they must be named.
        aim_s: Seconds within which they should be.
    """

    program: Program
    names: tuple[str, ...]
    floor_s: float
    aim_s: float


class _HangCatalogue:
    def __init__(self) -> None:
        self.hangs: dict[str, Hang] = {}

    def add(
        self, sentence: str, floor_s: float, aim_s: float, names: tuple[str, ...] = RANK_1
    ) -> Callable[[Callable[[everstep.Run, Diary], None]], Callable[[everstep.Run, Diary], None]]:
        """Return a decorator that adds a training function under its own name."""

        def added(train: Callable[[everstep.Run, Diary], None]) -> Callable[[everstep.Run, Diary], None]:
            program = Program(train.__name__, sentence, train, limit_s=LIMIT_S, is_comparable=False)
            self.hangs[program.name] = Hang(program, names, floor_s, aim_s)
            return train

        return added


CATALOGUE = _HangCatalogue()
stopped: dict[str, Any] = {"floor_s": 1.5, "aim_s": 0.7}
decidable: dict[str, Any] = {"floor_s": 10.0, "aim_s": 3.0}
undecidable: dict[str, Any] = {"floor_s": 90.0, "aim_s": 60.0}


def hang_rank_1(run: everstep.Run, diary: Diary, hang: Callable[[], object]) -> None:
    """Train; rank 1 hangs before the backward pass of a step, once."""
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        if step == HANG_STEP and run.rank == 1 and run.generation == 1:
            diary.note("hang")
            hang()
        training.learn(step)
    training.finish()


@CATALOGUE.add("Rank 1 is stopped by SIGSTOP.", **stopped)
def stopped_by_a_signal(run: everstep.Run, diary: Diary) -> None:
    hang_rank_1(run, diary, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@CATALOGUE.add("Rank 1's main thread and another thread wait for each other's lock.", **undecidable)
def deadlock_of_two_locks(run: everstep.Run, diary: Diary) -> None:
    def hang() -> None:
        first, second, both_held = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def other() -> None:
            with second:
                both_held.wait()
                first.acquire()

        with first:
            threading.Thread(target=other, daemon=True).start()
            both_held.wait()
            second.acquire()

    hang_rank_1(run, diary, hang)


@CATALOGUE.add("Rank 1 waits for a lock that no thread releases.", **undecidable)
def lock_that_stays_locked(run: everstep.Run, diary: Diary) -> None:
    def hang() -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    hang_rank_1(run, diary, hang)


@CATALOGUE.add("Rank 1 sleeps without end.", **undecidable)
def endless_sleep(run: everstep.Run, diary: Diary) -> None:
    hang_rank_1(run, diary, lambda: time.sleep(1e6))


@CATALOGUE.add("Rank 1 is in an endless loop of Python on one line.", **undecidable)
def endless_loop_in_python(run: everstep.Run, diary: Diary) -> None:
    def hang() -> None:
        for _ in itertools.repeat(None): pass  # fmt: skip # noqa: E701

    hang_rank_1(run, diary, hang)


def endless_machine_code(kind: Callable[..., Callable[[int], Callable[[], None]]]) -> None:
    """Call a function that jumps to itself."""
    code = b"\x00\x00\x00\x14" if platform.machine() == "aarch64" else b"\xeb\xfe"
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    kind(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


@CATALOGUE.add("Rank 1 is in an endless loop in C, without Python's lock.", **undecidable)
def endless_loop_in_c(run: everstep.Run, diary: Diary) -> None:
    hang_rank_1(run, diary, lambda: endless_machine_code(ctypes.CFUNCTYPE))


@CATALOGUE.add("Rank 1 is in an endless loop in C that holds Python's lock.", **undecidable)
def endless_loop_in_c_with_the_lock(run: everstep.Run, diary: Diary) -> None:
    hang_rank_1(run, diary, lambda: endless_machine_code(ctypes.PYFUNCTYPE))


@CATALOGUE.add("Rank 1 matches a regular expression that takes exponential time.", **undecidable)
def catastrophic_regular_expression(run: everstep.Run, diary: Diary) -> None:
    hang_rank_1(run, diary, lambda: re.match(r"(a+)+$", "a" * 60 + "b"))


@CATALOGUE.add("Both ranks reduce, over different groups.", **decidable, names=BOTH)
def collectives_over_different_groups(run: everstep.Run, diary: Diary) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        if step == HANG_STEP and run.generation == 1:
            diary.note("hang")
            dist.all_reduce(torch.zeros(1), group=groups[run.rank])
        training.learn(step)
    training.finish()


@CATALOGUE.add("Rank 1 alone calls a barrier before the backward pass of a step.", **decidable, names=BOTH + RANK_1)
def collective_on_one_rank(run: everstep.Run, diary: Diary) -> None:
    group = dist.new_group([0, 1])
    hang_rank_1(run, diary, lambda: dist.barrier(group))


@CATALOGUE.add("Rank 1 returns from the training function before the backward pass of a step.", **decidable)
def return_in_the_middle_of_a_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        if step == HANG_STEP and run.rank == 1:
            diary.note("hang")
            return
        training.learn(step)


@CATALOGUE.add("Rank 1 breaks out of the loop before the backward pass of a step.", **decidable)
def break_in_the_middle_of_a_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        if step == HANG_STEP and run.rank == 1:
            diary.note("hang")
            break
        training.learn(step)
    training.finish()


HANGS = CATALOGUE.hangs
