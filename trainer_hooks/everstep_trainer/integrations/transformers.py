"""Run transformers' Trainer inside a training function, with its state snapshotted after every update.

Example::

    def train(run):
        reset_accelerate()
        arguments = TrainingArguments("out", max_steps=10_000, save_strategy="no", ...)
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(...), arguments)
        loader = run.loader(dataset, global_batch=64, seed=1, collate_fn=collate, num_workers=2)
        attach(trainer, run, loader, seed=1)
        trainer.train()

A step of the run ends with an update by the Trainer (``state.global_step``), after one batch or
``gradient_accumulation_steps`` batches; a restored run computes all batches of an update again. accelerate uses the
generation's process group. Needs the distributions ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from everstep_trainer.data.loader import Loader
from everstep_trainer.run import Run


def reset_accelerate() -> None:
    """Drop accelerate's process-wide state: the ranks and devices of the previous generation.

    Call it first in the training function, before TrainingArguments reads that state.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def attach(trainer: Trainer, run: Run, loader: Loader, *, seed: int = 0, **extra_objects: Any) -> None:
    """Make a Trainer continue from the run's last update, with the batches of ``loader``.

    Batches have no end, and their sizes are the loader's, so the Trainer's arguments must set ``max_steps``.

    Args:
        trainer: The Trainer, before ``train``.
        run: The run of the training function.
        loader: A loader made by ``run.loader``.
        seed: Seed of the random streams, as for ``Run.steps``.
        extra_objects: Further objects to track by name, such as callbacks with ``state_dict``.

    Raises:
        ValueError: The Trainer's arguments have no positive ``max_steps``.
    """
    if trainer.args.max_steps <= 0:
        raise ValueError("set TrainingArguments(max_steps=...): the batches of an attached Trainer have no end")
    accumulated = trainer.args.gradient_accumulation_steps
    trainer.get_train_dataloader = lambda: _remaining_batches(run, loader, accumulated)
    trainer.add_callback(_EverstepCallback(trainer, run, seed, extra_objects))


def _remaining_batches(run: Run, loader: Loader, accumulated: int) -> Iterator[Any]:
    """Yield the batches from the first unfinished one on; begun only after the state was restored."""
    yield from map(loader.batch, itertools.count(run.last_finished_step * accumulated + 1))


class _EverstepCallback(TrainerCallback):
    """Tracks model, optimizer, schedule and loss scaler, and finishes a step of the run with each update."""

    def __init__(self, trainer: Trainer, run: Run, seed: int, extra_objects: dict[str, Any]) -> None:
        self._trainer, self._run = trainer, run
        self._seed, self._extra_objects = seed, extra_objects
        self._steps: Iterator[int] = iter(())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Track the objects: all are made and wrapped, and nothing is loaded yet."""
        trainer = self._trainer
        named = {"schedule": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            named["scaler"] = trainer.accelerator.scaler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's wrapper
        self._run.track(model=trainer.model_wrapped, optimizer=optimizer, **named, **self._extra_objects)
        self._steps = self._run.steps(until=sys.maxsize, seed=self._seed)
        finished = self._run.last_finished_step
        state.global_step = trainer._initial_global_step = trainer._globalstep_last_logged = finished
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        next(self._steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        next(self._steps)
