"""Run PyTorch Lightning inside a training function, with its Trainer's state snapshotted after every update.

Example::

    def train(run):
        trainer = Trainer(strategy=everstep_strategy(run), max_epochs=3)
        trainer.fit(Model(), DataLoader(dataset, batch_size=8, shuffle=True))

The strategy does everything: ranks and process group, tracking, and the right batches of the right epoch after a
restore. A script that has another strategy, or batches by the step, takes the parts::

    def train(run):
        loader = run.loader(dataset, global_batch=64, seed=1, num_workers=2)
        trainer = Trainer(
            max_steps=10_000, accelerator="auto", devices=run.local_world_size, num_nodes=..., strategy="ddp",
            plugins=[EverstepEnvironment(run)],
            callbacks=[EverstepCallback(run, seed=1)], enable_checkpointing=False,
        )
        trainer.fit(Model(), RemainingBatches(run, loader))

A step of the run ends with an update by Lightning (``trainer.global_step``), after one batch or
``accumulate_grad_batches`` batches. Gradients are not stored, so a restored run computes all batches of an update
again. A step is finished when the next batch begins. Validation and the hooks at an epoch's end belong to the step
before them, and run again if a rank is lost while they run. Lightning uses the generation's process group, and Regroup
passes through ``fit`` as through any function. Works with the packages ``pytorch_lightning`` and ``lightning``
(``lightning.pytorch``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.data.epochs import EpochLoader
from everstep_trainer.data.loader import Loader
from everstep_trainer.integrations.adapter_parts.lightning_files import CsvRows, keep_logger_versions, keep_newer_state
from everstep_trainer.integrations.adapter_parts.lightning_packages import (
    EverstepEnvironment,
    RunStrategyMixin,
    base,
    classes,
    global_seed,
    installed,
    make_strategy,
    package_in_use,
)
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["PACKAGES", "EverstepCallback", "EverstepEnvironment", "RemainingBatches", "everstep_strategy"]

PACKAGES = installed(("lightning", ".pytorch"), ("pytorch_lightning", ""))
"""The installed packages. Both define the same classes, and a Trainer refuses the other package's callbacks."""

_DDP_STRATEGIES = classes(PACKAGES, ".strategies", "DDPStrategy")

if not TYPE_CHECKING:
    Callback = base(PACKAGES, "", "Callback")


_completed: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
"""Batches that Lightning has completed, reported by EverstepCallback, from which RemainingBatches continues."""


class RemainingBatches:
    """The batches of ``run.loader`` from the first unfinished one on, without end: set ``max_steps`` to stop.

    Batch n is the batch of the loader's step n, however many batches an update accumulates.

    Args:
        run: The run of the training function.
        loader: A loader made by ``run.loader``.
    """

    def __init__(self, run: Run, loader: Loader) -> None:
        self._run, self._loader = run, loader

    def __iter__(self) -> Iterator[Any]:
        return map(self._loader.batch, itertools.count(_completed.get(self._run, self._run.last_finished_step) + 1))


class EverstepCallback(Callback):
    """Tracks model, optimizers, schedulers, loss scaler and progress; finishes a step of the run with each update.

    Args:
        run: The run of the training function.
        seed: Seed of the random streams, as for ``Run.steps``.
        extra_objects: Further objects to track by name, such as callbacks.
    """

    def __init__(self, run: Run, *, seed: int = 0, **extra_objects: Any) -> None:
        self._run, self._seed, self._extra_objects = run, seed, extra_objects
        self._steps: Iterator[int] = iter(())
        self._updates = -1  # Lightning's update count when the running step began; -1 equals none of them
        self.csv_rows: CsvRows | None = None  # read before any logger is used

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track the objects: the strategy has set them up, and loops and data have not begun."""
        _name_work(self._run, trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        named: dict[str, Any] = {f"scheduler{index}": scheduler for index, scheduler in enumerate(schedulers)}
        if trainer.precision_plugin.state_dict():
            named["precision"] = trainer.precision_plugin
        model = trainer.strategy.model if isinstance(trainer.strategy, _DDP_STRATEGIES) else pl_module
        named["progress"] = _FitProgress(trainer)
        self._run.track(model=model, optimizer=[*trainer.optimizers], **named, **self._all_extra_objects(trainer))
        keep_newer_state(self._run, trainer)
        if self.csv_rows is not None:
            self.csv_rows.restore(trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._record_completed(trainer)
        self._updates = -1
        self._steps = self._run.steps(until=sys.maxsize, seed=self._seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Finish the step here: only now does Lightning count the previous batch as completed."""
        self._finish_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have batches that were prefetched in this epoch fetched again in the next."""
        self._record_completed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_step(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Finish the last step, after all hooks of the training's end."""
        self._finish_step(trainer)
        self._run.end_steps()

    def _all_extra_objects(self, trainer: Trainer) -> dict[str, Any]:
        return self._extra_objects

    def _record_completed(self, trainer: Trainer) -> None:
        """Record the completed batches of all epochs."""
        _completed[self._run] = int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)

    def _finish_step(self, trainer: Trainer) -> None:
        """Finish a step only if there was an update: accumulated gradients are in no version."""
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            if self.csv_rows is not None:
                self.csv_rows.save()
            next(self._steps)


def _name_work(run: Run, trainer: Trainer) -> None:
    """Declare the work for which other ranks may wait; the strategy declares checkpoints."""
    work_alone(run, trainer._data_connector, prepare_data="preparing data")
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop):
        work_alone(run, loop, run="validation")
    work_alone(run, trainer.test_loop, run="test")
    work_alone(run, trainer.predict_loop, run="prediction")
    for logger in trainer.loggers:
        work_alone(run, logger, log_metrics="logging", log_hyperparams="logging", log_graph="logging", save="logging")
        work_alone(run, logger, after_save_checkpoint="upload", finalize="logging")


class _FitProgress:
    """The progress of a Trainer's loops as a tracked object, between two batches.

    It is read when a batch begins, and stored as if that batch had not begun. Lightning would take a batch that has
    begun for one that was validated or logged in part. Private names were read in Lightning 2.6.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        state["state_dict"].pop("combined_loader", None)
        batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
        for counts in (batches["total"], batches["current"]):
            counts["ready"] = counts["started"] = counts["processed"] = counts["completed"]
        batches["is_last_batch"] = False
        if not batches["current"]["completed"]:  # the epoch begins anew, with its hooks
            for counts in (epochs["total"], epochs["current"]):
                counts["ready"] = counts["started"] = counts["processed"]
        values = self._trainer._logger_connector._callback_metrics
        metrics = {name: values[name] for name in sorted(self._monitored()) if name in values}
        return state | {"should_stop": bool(self._trainer.should_stop), "metrics": metrics}

    def _monitored(self) -> set[str]:
        """Return the metrics that callbacks and schedules decide by, which may be older than this epoch."""
        names = {getattr(callback, "monitor", None) for callback in self._trainer.callbacks}
        return {name for name in names | {config.monitor for config in self._trainer.lr_scheduler_configs} if name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the progress, so that the next batch is trained at once, without a sanity check before."""
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(state)
        self._trainer.should_stop = state.get("should_stop", False)
        self._trainer._logger_connector._callback_metrics.update(state.get("metrics", {}))
        epoch_loop = fit_loop.epoch_loop
        epoch_loop.val_loop.restarting = True
        reset = epoch_loop.reset

        def reset_once() -> None:
            reset()
            epoch_loop.restarting = False
            epoch_loop.__dict__.pop("reset", None)

        if "reset" not in epoch_loop.__dict__:
            epoch_loop.reset = reset_once


class _StrategyCallback(EverstepCallback):
    """The callback that a strategy adds: it also tracks callbacks and the data module where they have a state."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: the strategy's own hook comes last."""

    def _all_extra_objects(self, trainer: Trainer) -> dict[str, Any]:
        known = {id(extra) for extra in self._extra_objects.values()}
        found: dict[str, Any] = {}
        holders = [*trainer.callbacks, *([trainer.datamodule] if trainer.datamodule is not None else [])]
        for holder in holders:
            if id(holder) not in known and _has_own_state(holder):
                name = type(holder).__name__
                number = sum(key.partition("-")[0] == name for key in found)
                name = f"{name}-{number}" if number else name
                average = getattr(holder, "_average_model", None)  # of StochasticWeightAveraging and WeightAveraging
                if isinstance(average, nn.Module):
                    found[f"{name}_average"], holder = average, _WithoutAverage(holder)
                found[name] = holder
        return found | self._extra_objects


class _WithoutAverage:
    """A callback's state without its averaged model, which is tracked as a module."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._callback.state_dict().items() if key != _AVERAGE_KEY}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        average = self._callback._average_model.state_dict()  # as it was restored; not all callbacks ask for it
        self._callback.load_state_dict(state | {_AVERAGE_KEY: average})


_AVERAGE_KEY = "average_model_state"


def _has_own_state(holder: Any) -> bool:
    """Return whether a callback or data module of the script's has a state; a Timer's is a duration of its own rank."""
    method = getattr(type(holder), "state_dict", None)
    inherited = {getattr(kind, "state_dict", None) for kind in type(holder).__mro__ if kind.__name__ in _HOLDERS}
    return method not in inherited and type(holder).__name__ != "Timer"


_HOLDERS = ("Callback", "LightningDataModule", "DataHooks", "CheckpointHooks")


class _FitBatches:
    """The batches of a training loader, from the Trainer's next one on."""

    def __init__(self, trainer: Trainer, loader: EpochLoader) -> None:
        self._trainer, self.loader, self.dataset = trainer, loader, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches; the place is read when the first is asked for, since the restore comes before."""
        loop = self._trainer.fit_loop
        first = loop.epoch_loop.batch_progress.current.ready
        try:
            first %= len(self)  # a shorter loader of several begins again within an epoch
        except TypeError:
            pass
        yield from self.loader.take(loop.epoch_progress.current.processed, first)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing; Lightning takes a loader with this method for one that can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class _TrainerStrategy(RunStrategyMixin):
    """A Trainer's strategy on a run: adds the callback, and takes over the training loaders."""

    everstep_options: Mapping[str, Any]
    _callback: EverstepCallback | None = None

    def setup_environment(self) -> None:
        """Add the callback in front of all others, which then see the restored state."""
        super().setup_environment()
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]  # the strategy's
        _name_work(self.run, trainer)
        found = [callback for callback in trainer.callbacks if isinstance(callback, EverstepCallback)]
        self._callback = found[0] if found else None
        if self._callback is None and trainer.state.fn == "fit":
            options = self.everstep_options
            self._callback = _StrategyCallback(self.run, seed=options["seed"], **options["tracked"])
            trainer.callbacks.insert(0, self._callback)
        if self._callback is not None and trainer.state.fn == "fit":
            keep_logger_versions(self.run, trainer.loggers)
            self._callback.csv_rows = CsvRows(self.run, trainer.loggers)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self.run.distributed:
            wrapped: torch.nn.Module = super()._setup_model(model)  # type: ignore[misc]  # the strategy's
            return wrapped
        options = {"device_ids": self.determine_ddp_device_ids()} | self._ddp_kwargs  # type: ignore[attr-defined]
        return self.run.replicate(model, exact=self.everstep_options["exact"], **options)

    def _register_ddp_hooks(self) -> None:
        if isinstance(self.model, DistributedDataParallel) and not self.model._comm_hooks:  # type: ignore[attr-defined]
            super()._register_ddp_hooks()  # type: ignore[misc]  # the strategy's

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]  # the strategy's
        if not trainer.training or isinstance(dataloader, RemainingBatches | _FitBatches):
            return dataloader
        options = self.everstep_options
        loader = self.run.epoch_loader(dataloader, global_batch=options["global_batch"], seed=options["seed"])
        return _FitBatches(trainer, loader)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weight the loss where ranks have shares of different sizes."""
        combined = self.lightning_module.trainer.fit_loop._combined_loader  # type: ignore[attr-defined]
        first = combined.flattened[0] if combined is not None and combined.flattened else None
        weight = first.loader.loss_weight if isinstance(first, _FitBatches) else 1.0
        return super().backward(closure_loss if weight == 1.0 else closure_loss * weight, *args, **kwargs)  # type: ignore[misc]

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]  # the strategy's
        if isinstance(self._callback, _StrategyCallback):
            self._callback.finish(self.lightning_module.trainer)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        super().teardown()  # type: ignore[misc]  # the strategy's
        self.release_group()


def everstep_strategy(
    run: Run,
    kind: type | None = None,
    *,
    seed: int | None = None,
    global_batch: int | None = None,
    exact: bool = True,
    tracked: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a strategy that runs a Trainer on a run: the one line that a script of Lightning needs.

    ``devices`` and ``num_nodes`` of the Trainer are ignored: the generation determines them. The script's own
    DataLoader or data module is kept, with ``max_epochs`` or ``max_steps``. Callbacks with a state are tracked.

    Args:
        run: The run of the training function.
        kind: Lightning's class; default: DDPStrategy. ModelParallelStrategy for FSDP2, with ``fully_shard`` in
            ``configure_model``.
        seed: Seed of the shuffle and of the random streams; default: that of ``seed_everything``, or 0.
        global_batch: Samples of a batch over all ranks; default: the loader's batch on each rank.
        exact: As for ``Run.replicate``; for DDPStrategy only.
        tracked: Further objects to track, by name.
        options: Passed to Lightning's class, such as ``find_unused_parameters``.

    Raises:
        TypeError: ``kind`` is FSDPStrategy, whose state cannot be restored.
    """
    if kind is None:
        (kind,) = classes((package_in_use(PACKAGES),), ".strategies", "DDPStrategy")
    assert kind is not None
    strategy = make_strategy(run, _TrainerStrategy, kind, options)
    strategy.everstep_options = {
        "seed": global_seed() if seed is None else seed,
        "global_batch": global_batch,
        "exact": exact,
        "tracked": dict(tracked or {}),
    }
    return strategy
