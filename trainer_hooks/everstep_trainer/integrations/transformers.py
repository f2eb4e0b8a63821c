"""Run transformers' Trainer inside a training function, with its state snapshotted after every update.

Example::

    def train(run):
        arguments = TrainingArguments("out", num_train_epochs=3, save_strategy="no", ...)
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(...), arguments, train_dataset=dataset)
        attach(trainer, run)
        trainer.train()

The Trainer takes its own batches, and continues at the next one of the right epoch after a restore. A script that has
batches by the step gives them to ``attach`` instead of a data set::

        loader = run.loader(dataset, global_batch=64, seed=1, collate_fn=collate, num_workers=2)
        attach(trainer, run, loader, seed=1)

A step of the run ends with an update by the Trainer (``state.global_step``), after one batch or
``gradient_accumulation_steps`` batches; a restored run computes all batches of an update again. accelerate uses the
generation's process group. Needs the distributions ``transformers`` and ``accelerate``. Private names were read in
transformers 5.23.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from everstep_trainer.data.epochs import EpochLoader
from everstep_trainer.data.loader import Loader, is_stream
from everstep_trainer.integrations.accelerate import reset_accelerate, unprepared
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run

__all__ = ["attach", "reset_accelerate"]

log = logging.getLogger(__name__)

MAX_LOG_ROWS = 5000
"""Rows of a Trainer's ``log_history`` that are restored, the newest ones."""


def attach(
    trainer: Trainer,
    run: Run,
    loader: Loader | None = None,
    *,
    seed: int | None = None,
    global_batch: int | None = None,
    exact: bool = True,
    **extra_objects: Any,
) -> None:
    """Make a Trainer continue from the run's last update, with its own batches or those of ``loader``.

    Args:
        trainer: The Trainer, before ``train``.
        run: The run of the training function.
        loader: A loader made by ``run.loader``; default: the Trainer's own DataLoader. The batches of a loader have no
            end, and their sizes are the loader's, so the Trainer's arguments must set ``max_steps``.
        seed: Seed of the random streams, as for ``Run.steps``; default: 0 with a loader, else the Trainer's seed.
        global_batch: Samples of a batch over all ranks, without a loader; default: the Trainer's on each rank.
        exact: Add the gradients of a DistributedDataParallel in the order of ranks; see ``Run.exact_gradients``.
        extra_objects: Further objects to track by name, such as callbacks with ``state_dict``.

    Raises:
        ValueError: A loader is given, and the Trainer's arguments have no positive ``max_steps``. Or the Trainer uses
            generated completions over several updates, and ``exact`` is set.
    """
    _check_reused_completions(trainer, exact)
    if loader is None:
        if seed is None:
            seed = trainer.args.seed
        epochs = _Epochs(trainer, run, seed, global_batch)
        callback: _TransformersCallback = _EpochCallback(trainer, run, seed, exact, extra_objects, epochs)
    else:
        if trainer.args.max_steps <= 0:
            raise ValueError("set TrainingArguments(max_steps=...): the batches of an attached Trainer have no end")
        accumulated = trainer.args.gradient_accumulation_steps
        trainer.get_train_dataloader = lambda: _remaining_batches(run, loader, accumulated)
        objects = {"log_history": _TrackedLogHistory(trainer)} | extra_objects
        callback = _TransformersCallback(trainer, run, seed or 0, exact, objects)
    trainer.add_callback(callback)
    _leave_out_checkpoint(trainer, run)
    work_alone(run, trainer, _save_checkpoint="checkpoint", save_model="saving the model", push_to_hub="upload")
    work_alone(run, trainer, evaluate="evaluation", predict="prediction", log="logging")
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, callbacks.pop())  # before all others, which then see the restored state


def _leave_out_checkpoint(trainer: Trainer, run: Run) -> None:
    """After a regroup, do not read the checkpoint of ``train``: a rank may have died while it wrote that one."""
    train = trainer.train

    def train_from_memory(resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        if resume_from_checkpoint and run.generation > 1 and run._context.will_restore:
            if run.rank == 0:
                message = "resume_from_checkpoint=%s is not read: after a regroup the state in memory continues"
                log.warning(message, resume_from_checkpoint)
            resume_from_checkpoint = None
        return train(resume_from_checkpoint=resume_from_checkpoint, **options)

    trainer.train = train_from_memory


def _check_reused_completions(trainer: Trainer, exact: bool) -> None:
    """Refuse trainers like trl's GRPOTrainer that keep completions for later updates: no version contains them."""
    arguments = trainer.args
    iterations, per_generation = (
        getattr(arguments, key, None) or 1 for key in ("num_iterations", "steps_per_generation")
    )
    if (
        not hasattr(trainer, "_buffered_inputs")
        or arguments.gradient_accumulation_steps % (iterations * per_generation) == 0
    ):
        return
    sentence = (
        f"{type(trainer).__name__} uses generated completions over several updates (steps_per_generation="
        f"{per_generation}, num_iterations={iterations}, gradient_accumulation_steps="
        f"{arguments.gradient_accumulation_steps}), and they are not stored: after a lost rank it would generate others"
    )
    if exact:
        raise ValueError(
            f"{sentence}. Set num_iterations=1 and steps_per_generation to gradient_accumulation_steps, or accept that "
            "by attach(..., exact=False)"
        )
    log.warning("%s", sentence)


def _remaining_batches(run: Run, loader: Loader, accumulated: int) -> Iterator[Any]:
    """Yield the batches from the first unfinished one on; begun only after the state was restored."""
    yield from map(loader.batch, itertools.count(run.last_finished_step * accumulated + 1))


class _TransformersCallback(TrainerCallback):
    """Tracks model, optimizer, schedule and loss scaler, and finishes a step of the run with each update."""

    def __init__(self, trainer: Trainer, run: Run, seed: int, exact: bool, extra_objects: dict[str, Any]) -> None:
        self._trainer, self._run = trainer, run
        self._seed, self._exact, self._extra_objects = seed, exact, extra_objects
        self._steps: Iterator[int] = iter(())
        self._updates = -1  # the Trainer's update count when the running step began; -1 equals none of them

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Track the objects: all are made and wrapped, and nothing is loaded yet."""
        trainer = self._trainer
        named = {"schedule": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            named["scaler"] = trainer.accelerator.scaler
        reference = getattr(trainer, "ref_model", None)
        if reference is not None and getattr(args, "sync_ref_model", False):  # it follows the model during training
            named["ref_model"] = trainer.accelerator.unwrap_model(reference)
        if self._exact:
            self._run.exact_gradients(trainer.model_wrapped)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's wrapper
        self._run.track(model=trainer.model_wrapped, optimizer=optimizer, **named, **self._extra_objects)
        self._steps, self._updates = self._run.steps(until=sys.maxsize, seed=self._seed), -1
        state.global_step = self._choose_update(state.global_step)
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
        if state.global_step >= state.max_steps:
            control.should_training_stop = True

    def _choose_update(self, loaded: int) -> int:
        """Return the update to continue after; ``loaded`` is that of ``train(resume_from_checkpoint=...)``, or 0.

        Raises:
            ValueError: Batches come from a loader, whose place in a checkpoint of the Trainer is not known.
        """
        if loaded and not self._run.last_finished_step:
            raise ValueError(
                "train(resume_from_checkpoint=...) cannot continue batches of run.loader: attach(trainer, run) without "
                "a loader, or start from the checkpoint's weights alone with everstep-launch --start-from"
            )
        if loaded and self._run.rank == 0:
            message = "resume_from_checkpoint is not used: it has update %d, and the run continues after update %d"
            log.warning(message, loaded, self._run.last_finished_step)
        return self._run.last_finished_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finish the step before: evaluation and saving after its update belong to it."""
        self._finish_step(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._finish_step(state)
        self._run.end_steps()

    def _finish_step(self, state: TrainerState) -> None:
        if state.global_step != self._updates:
            self._updates = state.global_step
            next(self._steps)


# ---- epochs of the Trainer's own DataLoader


class _Place:
    """The first epoch to train, which the Trainer's loop reads only after the restore."""

    def __init__(self) -> None:
        self.epoch = self.updates = 0

    def __index__(self) -> int:
        return self.epoch


class _TrainingLoader:
    """The batches of the Trainer's own DataLoader, one epoch in each iteration."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader, self.dataset = loader, loader.dataset
        self.epoch = self.first = 0
        self.weights: deque[float] = deque()  # of batches taken; the Trainer takes those of an update ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.weights.clear()
        for batch in self._loader.take(self.epoch, self.first):
            self.weights.append(self._loader.loss_weight)
            yield batch


class _Epochs:
    """Leads a Trainer's loop to the first unfinished batch, by replacing three methods of this Trainer.

    It is a tracked object, too: the place in the epochs, and what decides about the end of training.
    """

    def __init__(self, trainer: Trainer, run: Run, seed: int, global_batch: int | None) -> None:
        self._trainer, self._run = trainer, run
        self._seed, self._global_batch = seed, global_batch
        self._begin, self._now = _Place(), _Place()
        self._loader: _TrainingLoader | None = None
        self._batches_of_epoch = 0
        self.checkpoint: Any = None  # of train(resume_from_checkpoint=...)
        self.loaded_updates = self.restored_updates = 0  # of the checkpoint, and of the restored version
        self._file_place = 0, 0  # epoch and finished updates in it
        self._file_history: list[dict[str, Any]] = []
        self._history = LogHistory()
        self._make_loader: Callable[[], Any] = trainer.get_train_dataloader
        self._init_state: Callable[..., tuple[int, int]] = trainer._init_training_state
        self._epoch_loop: Callable[..., None] = trainer._run_epoch
        trainer.get_train_dataloader = self.make_loader
        trainer._init_training_state = self.init_state
        trainer._run_epoch = self.run_epoch
        self._backward: Callable[..., None] = trainer.accelerator.backward
        if not self._counts_tokens():
            trainer.accelerator.backward = self.backward

    def _counts_tokens(self) -> bool:
        """Return whether the Trainer itself weights losses, by the number of tokens on all ranks."""
        normalized = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func is not None
        return bool(normalized and self._trainer.args.average_tokens_across_devices)

    def make_loader(self) -> _TrainingLoader:
        """Return the batches of the Trainer's DataLoader, taken before accelerate splits it over the ranks.

        Raises:
            ValueError: The data have no length, or the sampler splits by rank itself.
        """
        trainer = self._trainer
        if trainer.train_dataset is not None and is_stream(trainer.train_dataset):
            given, whole = self._make_loader(), None
        else:
            trainer.accelerator.prepare = lambda made: made
            try:
                given, whole = unprepared(self._make_loader())
            finally:
                del trainer.accelerator.prepare
        if type(getattr(given, "batch_sampler", None)).__name__ == "BatchRebalanceSampler":
            raise ValueError('train_sampling_strategy="batch_rebalance" splits by rank: take "group_by_length"')
        batch = self._global_batch or whole
        order = trainer.args.data_seed
        seed = self._seed if order is None else order
        self._loader = _TrainingLoader(self._run.epoch_loader(given, global_batch=batch, seed=seed))
        try:
            len(self._loader)
        except TypeError as error:
            raise ValueError(
                "the training data have no length, so no epoch can be found again: give the data set a __len__, or "
                "batches by the step: attach(trainer, run, run.loader(dataset, ...))"
            ) from error
        return self._loader

    def init_state(self, *arguments: Any, **options: Any) -> tuple[_Place, int]:
        """Return a place in the epochs that is read after the restore."""
        epoch, batches = self._init_state(*arguments, **options)
        self._begin, self._now = _Place(), _Place()
        self.checkpoint = arguments[3] if len(arguments) > 3 else options.get("resume_from_checkpoint")
        self.loaded_updates = self._trainer.state.global_step
        self._file_history = list(self._trainer.state.log_history)
        self._file_place = epoch, batches // self._trainer.args.gradient_accumulation_steps
        return self._begin, 0

    def continue_file(self) -> None:
        """Begin where the checkpoint of ``train(resume_from_checkpoint=...)`` was saved."""
        for place in (self._begin, self._now):
            place.epoch, place.updates = self._file_place

    def load_file(self) -> None:
        """Load that checkpoint again, over an older state that was restored since."""
        trainer = self._trainer
        trainer._load_from_checkpoint(self.checkpoint, trainer.model_wrapped)
        trainer._load_optimizer_and_scheduler(self.checkpoint)
        trainer._load_scaler(self.checkpoint)
        trainer.state.log_history = self._file_history
        self.continue_file()

    def run_epoch(self, *, epoch: int, steps_in_epoch: int, num_update_steps_per_epoch: int, **options: Any) -> None:
        """Run what remains of an epoch."""
        done = self._begin.updates if epoch == self._begin.epoch else 0
        state, control = self._trainer.state, self._trainer.control
        if control.should_training_stop or state.global_step >= state.max_steps or done >= num_update_steps_per_epoch:
            return
        assert self._loader is not None
        self._now.epoch, self._now.updates = epoch, done
        self._batches_of_epoch = steps_in_epoch
        self._loader.epoch, self._loader.first = epoch, done * self._trainer.args.gradient_accumulation_steps
        self._epoch_loop(
            epoch=epoch,
            steps_in_epoch=steps_in_epoch - self._loader.first,
            num_update_steps_per_epoch=num_update_steps_per_epoch - done,
            **options,
        )

    def count_update(self, state: TrainerState) -> None:
        """Count an update, and correct the epoch that the Trainer computed from the remaining batches."""
        self._now.updates += 1
        batches = self._now.updates * self._trainer.args.gradient_accumulation_steps
        state.epoch = self._now.epoch + min(batches, self._batches_of_epoch) / self._batches_of_epoch

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Weight the loss where ranks have shares of different sizes."""
        weights = self._loader.weights if self._loader is not None else None
        weight = weights.popleft() if weights else 1.0
        self._backward(loss if weight == 1.0 else loss * weight, **options)

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "epoch": self._now.epoch,
            "updates": self._now.updates,
            "best": [state.best_metric, state.best_global_step, state.best_model_checkpoint],
            "tokens": int(state.num_input_tokens_seen),
            "stops": self._trainer.control.should_training_stop,
            "updates_in_all": state.global_step,
            "history": self._history.encode(state.log_history),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
        }

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        state = self._trainer.state
        for place in (self._begin, self._now):
            place.epoch, place.updates = stored["epoch"], stored["updates"]
        state.best_metric, state.best_global_step, state.best_model_checkpoint = stored["best"]
        state.num_input_tokens_seen = stored["tokens"]
        self._trainer.control.should_training_stop = stored["stops"]
        self.restored_updates = stored["updates_in_all"]
        state.log_history = self._history.decode(stored["history"])
        for callback, attributes in zip(self._callbacks(), stored["callbacks"], strict=True):
            vars(callback).update(attributes)

    def _callbacks(self) -> list[Any]:
        """Return the callbacks with a state, such as EarlyStoppingCallback."""
        return [
            callback for callback in self._trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
        ]


class LogHistory:
    """The rows of a Trainer's ``log_history`` as one text, which grows with the rows.

    Times are left out: they differ from rank to rank, and any rank's state may replace that of a lost rank.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_LOG_ROWS)
        self._count, self._text = 0, ""

    def encode(self, rows: list[dict[str, Any]]) -> str:
        if len(rows) < self._count:
            self._lines.clear()
            self._count = 0
        if len(rows) != self._count:
            self._lines.extend(json.dumps(_without_times(row), default=float) for row in rows[self._count :])
            self._count, self._text = len(rows), "\n".join(self._lines)
        return self._text

    def decode(self, text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines()]


class _TrackedLogHistory:
    """A Trainer's ``log_history`` as a tracked object, where no `_Epochs` stores it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._history = trainer, LogHistory()

    def state_dict(self) -> dict[str, Any]:
        return {"history": self._history.encode(self._trainer.state.log_history)}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self._trainer.state.log_history = self._history.decode(stored["history"])


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith(("_runtime", "_per_second"))}


class _EpochCallback(_TransformersCallback):
    """Also tracks the place in the epochs."""

    def __init__(
        self, trainer: Trainer, run: Run, seed: int, exact: bool, extra_objects: dict[str, Any], epochs: _Epochs
    ) -> None:
        super().__init__(trainer, run, seed, exact, {"epochs": epochs} | extra_objects)
        self._epochs = epochs

    def _choose_update(self, loaded: int) -> int:
        """Take the newer one of the state in memory and the checkpoint; after a regroup memory has the state."""
        epochs, restored = self._epochs, self._epochs.restored_updates
        if not epochs.loaded_updates:
            return restored
        is_regroup = self._run.generation > 1 and self._run.last_finished_step > 0
        from_file = not is_regroup and epochs.loaded_updates > restored
        if self._run.rank == 0 and self._run.last_finished_step:
            message = "resume_from_checkpoint=%s has update %d, the run's own state update %d: it continues after %d"
            after = epochs.loaded_updates if from_file else restored
            log.warning(message, epochs.checkpoint, epochs.loaded_updates, restored, after)
        if not from_file:
            return restored
        if self._run.last_finished_step:
            epochs.load_file()
        epochs.continue_file()
        return epochs.loaded_updates

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._epochs.count_update(state)
