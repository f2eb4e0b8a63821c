"""Steps that take longer than others, slow data, and a machine that has other things to do."""

from __future__ import annotations

import os
import pdb
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import everstep
from bench.calm import surroundings
from bench.calm.program import Diary, compute, pace, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.programs.lone_work import work_alone
from bench.calm.training import SmallTraining

WIDTH = 64


@CATALOGUE.add("The first step takes 6 s, as a compilation does.")
def slow_first_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=60, seed=1):
        if step == 1:
            compute(6)
        training.learn(step)
    training.finish()


@CATALOGUE.add("The first step of rank 1 takes 6 s longer than that of rank 0.")
def slow_first_step_on_one_rank(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=60, seed=1):
        if step == 1 and run.rank == 1:
            compute(6)
        training.learn(step)
    training.finish()


@CATALOGUE.add("Every 20th step takes 50 times as long.")
def slow_step_every_20(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=90, seed=1):
        if step % 20 == 0:
            pause(2)
        training.learn(step)
    training.finish()


class Samples(Dataset[torch.Tensor]):
    """Samples of ``width`` x ``depth`` floats; a few take ``slow_s`` seconds."""

    def __init__(self, width: int = WIDTH, depth: int = 1, slow_s: float = 0.0) -> None:
        self.width, self.depth, self.slow_s = width, depth, slow_s

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow_s and index % 64 == 7:
            time.sleep(self.slow_s * pace())
        return torch.full((self.width, self.depth), float(index % 7) / 7)


def _learn_from_loader(run: everstep.Run, diary: Diary, samples: Samples, steps: int) -> None:
    torch.manual_seed(0)
    width = samples.width
    model = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
    )
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = run.loader(samples, global_batch=16, num_workers=2)
    run.track(model=replicas, optimizer=optimizer)
    for step in run.steps(until=steps, seed=1):
        inputs = loader.batch(step)[..., 0]
        loss = (replicas(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diary.loss(step, loss)
        pause(0.03)
    diary.final(model)


@CATALOGUE.add("Two worker processes load each rank's batches.")
def loader_with_workers(run: everstep.Run, diary: Diary) -> None:
    _learn_from_loader(run, diary, Samples(), 60)


@CATALOGUE.add("Worker processes load a few samples for 3 s each.")
def slow_loader_workers(run: everstep.Run, diary: Diary) -> None:
    _learn_from_loader(run, diary, Samples(slow_s=3.0), 40)


@CATALOGUE.add(
    "/dev/shm has 64 MiB, a container's default; versions of 36 MB; workers load batches of 6 MB.", shared_memory="64m"
)
def small_shared_memory(run: everstep.Run, diary: Diary) -> None:
    _learn_from_loader(run, diary, Samples(width=1000, depth=100), 25)


@CATALOGUE.add("Rank 1 has the lowest priority, beside two busy loops.", beside=surroundings.busy_loops(2))
def niced_rank(run: everstep.Run, diary: Diary) -> None:
    if run.rank == 1 and pace():
        os.nice(19)
    training = SmallTraining(run, diary)
    training.train(60)
    training.finish()


@CATALOGUE.add(
    "20 busy loops run beside the program; rank 0 validates for 3 s, twice.",
    beside=surroundings.busy_loops(20),
    effects={"validation": 2},
    limit_s=300.0,
)
def twenty_busy_loops(run: everstep.Run, diary: Diary) -> None:
    work_alone(run, diary, "validation", 70, lambda: compute(3))


@CATALOGUE.add("Rank 0 stops in pdb at step 30 for 8 s.", effects={"debugging": 1})
def debugger(run: everstep.Run, diary: Diary) -> None:
    def debug() -> None:
        if not pace():
            return
        reader, writer = os.pipe()
        threading.Timer(8, os.write, (writer, b"continue\n")).start()
        with open(reader) as typed, open(os.devnull, "w") as shown:
            pdb.Pdb(stdin=typed, stdout=shown, nosigint=True).set_trace()
            time.sleep(0)  # the debugger stops here
        os.close(writer)

    work_alone(run, diary, "debugging", 50, debug)


@CATALOGUE.add("Rank 0 reads a file whose storage answers after 6 s.", effects={"read": 1})
def stalled_storage(run: everstep.Run, diary: Diary) -> None:
    fifo = diary.folder / "stalled"

    def read() -> None:
        os.mkfifo(fifo)
        threading.Timer(6 * pace(), lambda: fifo.write_bytes(b"data")).start()
        assert fifo.read_bytes() == b"data"
        fifo.unlink()

    work_alone(run, diary, "read", 50, read)
