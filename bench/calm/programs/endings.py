"""Ends of programs: early, by a signal, or beside another job."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

import everstep
from bench.calm.program import Diary, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.training import SmallTraining

STATUS_OF_SIGTERM = 128 + signal.SIGTERM


@CATALOGUE.add(
    "The launcher gets SIGTERM; the script's own handler ends the loop, and rank 0 saves for 3 s.",
    terminate_at_step=30,
    status=STATUS_OF_SIGTERM,
    effects={"emergency save": 1},
    is_comparable=False,
)
def own_handler_of_sigterm(run: everstep.Run, diary: Diary) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    training = SmallTraining(run, diary)
    for step in training.steps(2000):
        stop = torch.tensor(len(asked))
        dist.all_reduce(stop)
        if stop:
            if run.rank == 0:
                with diary.effect("emergency save", step):
                    pause(3)
                    torch.save(training.model.state_dict(), diary.folder / "emergency.pt")
            break
    training.finish()


@CATALOGUE.add("All ranks stop early, by the mean of their losses.")
def early_stop_by_mean(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=400, seed=1):
        loss = training.learn(step)
        if run.mean(loss, training.sampler.loss_weight(step)) < 9.0:
            break
    training.finish()


@CATALOGUE.add("All ranks break out of the loop at step 50 of 400.")
def break_at_the_same_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in training.steps(400):
        if step == 50:
            break
    training.finish()


@CATALOGUE.add("All ranks return from the training function at step 50, after the rest of the function was skipped.")
def return_at_the_same_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in training.steps(400):
        if step == 50:
            training.finish()
            return


@CATALOGUE.add("Two jobs of a sweep on one machine at once.", jobs=2)
def sweep_of_two_jobs(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    training.train(80)
    training.finish()
