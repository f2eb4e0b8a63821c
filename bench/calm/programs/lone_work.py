"""One rank works alone, or all ranks work outside of training, while nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

import torch

import everstep
from bench.calm import surroundings
from bench.calm.program import Diary, compute, pace, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.training import SmallTraining

EVERY = 30
"""Steps from one validation to the next: time enough for a watchdog to learn how long a step takes."""
COMPUTE_FOR = (
    "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: sum(range(999))"
)


def work_alone(run: everstep.Run, diary: Diary, name: str, until: int, work: Callable[[], object]) -> None:
    """Train, and let rank 0 work alone at every 30th step."""
    training = SmallTraining(run, diary)
    for step in training.steps(until):
        if step % EVERY == 0 and run.rank == 0:
            with diary.effect(name, step):
                work()
    training.finish()


@CATALOGUE.add("Rank 0 sleeps for 4 s in a validation, three times.", effects={"validation": 3})
def lone_validation_of_4s(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "validation", 100, lambda: pause(4))


@CATALOGUE.add("Rank 0 of three sleeps for 12 s in a validation.", ranks=3, effects={"validation": 1})
def lone_validation_of_12s(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "validation", 50, lambda: pause(12))


@CATALOGUE.add("Rank 0 computes for 4 s in a validation, twice.", effects={"validation": 2})
def lone_validation_that_computes_4s(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "validation", 70, lambda: compute(4))


@CATALOGUE.add("Rank 0 computes for 12 s in a validation.", effects={"validation": 1})
def lone_validation_that_computes_12s(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "validation", 50, lambda: compute(12))


@CATALOGUE.add("All ranks validate for 6 s, twice.", effects={"validation": 4})
def validation_on_all_ranks(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in training.steps(70):
        if step % EVERY == 0:
            with diary.effect("validation", step):
                pause(6)
    training.finish()


@CATALOGUE.add("Rank 0 validates for 6 s under run.atomic, twice.", effects={"validation": 2})
def validation_in_atomic(run: everstep.Run, diary: Diary) -> None:
    def validate() -> None:
        with run.atomic():
            pause(6)

    work_alone(run, diary, "validation", 70, validate)


@CATALOGUE.add("Rank 0 validates for 6 s under run.alone, twice.", effects={"validation": 2})
def validation_in_alone(run: everstep.Run, diary: Diary) -> None:
    def validate() -> None:
        with run.alone("validation", limit_s=60):
            pause(6)

    work_alone(run, diary, "validation", 70, validate)


@CATALOGUE.add("Rank 0 waits for an evaluation program that computes for 5 s.", effects={"evaluation": 1})
def evaluation_in_a_child_program(run: everstep.Run, diary: Diary) -> None:
    command = [sys.executable, "-c", COMPUTE_FOR, str(5 * pace())]
    work_alone(run, diary, "evaluation", 50, lambda: subprocess.run(command, check=True))


@CATALOGUE.add("Rank 0 waits for a child that sleeps for 6 s, as one that submits a job does.", effects={"job": 1})
def child_that_sleeps(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "job", 50, lambda: subprocess.run(["sleep", str(6 * pace())], check=True))


@CATALOGUE.add(
    "Rank 0 downloads from a server that sends a piece every 0.5 s for 8 s.",
    effects={"download": 1},
    beside=surroundings.slow_server,
)
def slow_download(run: everstep.Run, diary: Diary) -> None:
    def download() -> None:
        with urllib.request.urlopen(os.environ["CALM_URL"]) as answer:
            assert len(answer.read()) == surroundings.DOWNLOAD_BYTES

    work_alone(run, diary, "download", 50, download)


@CATALOGUE.add("Rank 0 prepares a file for 6 s; the other rank polls for it.", effects={"prepared": 1, "read": 2})
def polling_for_a_file(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    prepared = diary.folder / "prepared"
    for step in training.steps(50):
        if step != EVERY:
            continue
        if run.rank == 0:
            with diary.effect("prepared", step):
                pause(6)
                prepared.touch()
        with diary.effect("read", step):
            while not prepared.exists():
                time.sleep(0.1)
    training.finish()


@CATALOGUE.add("Rank 0 draws figures for 5 s.", effects={"figures": 1})
def plotting(run: everstep.Run, diary: Diary) -> None:
    def draw() -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        deadline = time.monotonic() + 5 * pace()
        while True:
            figure, axes = pyplot.subplots(4, 4, figsize=(12, 12))
            for place in axes.flat:
                place.plot(torch.randn(2000).numpy())
            figure.savefig(diary.folder / "figure.png")
            pyplot.close(figure)
            if time.monotonic() >= deadline:
                return

    work_alone(run, diary, "figures", 50, draw)


@CATALOGUE.add("Rank 0 prints 100,000 lines, twice.", effects={"lines": 2})
def many_lines(run: everstep.Run, diary: Diary) -> None:
    def speak() -> None:
        for number in range(100_000):
            print(f"sample {number}: prediction {number % 7}, target {number % 5}")

    work_alone(run, diary, "lines", 70, speak)
