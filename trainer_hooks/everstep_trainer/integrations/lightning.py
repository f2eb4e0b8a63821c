"""Run PyTorch Lightning inside a training function, with its Trainer's state snapshotted after every update.

Example::

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
again. Lightning uses the generation's process group, and Regroup passes through ``fit`` as through any function.
Works with the packages ``pytorch_lightning`` and ``lightning`` (``lightning.pytorch``).
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from everstep_trainer.data.loader import Loader
from everstep_trainer.run import Run

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins.environments import ClusterEnvironment

PACKAGES = tuple(
    f"{name}{rest}" for name, rest in (("lightning", ".pytorch"), ("pytorch_lightning", "")) if find_spec(name)
)
"""The installed packages. Both define the same classes, and a Trainer refuses the other package's callbacks."""

if not PACKAGES:
    raise ModuleNotFoundError(
        "PyTorch Lightning is not installed: pip install lightning, or pip install pytorch-lightning"
    )


def _classes(module: str, name: str) -> tuple[Any, ...]:
    """Return the class of that name in each installed package."""
    return tuple(getattr(importlib.import_module(package + module), name) for package in PACKAGES)


def _base(module: str, name: str) -> Any:
    """Return one class derived from the class of that name in each package, so that every Trainer accepts it."""
    return types.new_class(name, _classes(module, name))


_DDP_STRATEGIES = _classes(".strategies", "DDPStrategy")

if not TYPE_CHECKING:
    Callback = _base("", "Callback")
    ClusterEnvironment = _base(".plugins.environments", "ClusterEnvironment")


class EverstepEnvironment(ClusterEnvironment):
    """A Lightning cluster environment that describes this rank; Everstep starts processes and makes process groups."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Unused: Lightning makes no rendezvous here."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the generation determines it."""

    def global_rank(self) -> int:
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the generation determines it."""

    def local_rank(self) -> int:
        return self._run.local_rank

    def node_rank(self) -> int:
        return self._run.rank // self._run.local_world_size


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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track the objects: the strategy has set them up, and loops and data have not begun."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        named: dict[str, Any] = {f"scheduler{index}": scheduler for index, scheduler in enumerate(schedulers)}
        if trainer.precision_plugin.state_dict():
            named["precision"] = trainer.precision_plugin
        model = trainer.strategy.model if isinstance(trainer.strategy, _DDP_STRATEGIES) else pl_module
        named["progress"] = trainer.fit_loop
        self._run.track(model=model, optimizer=[*trainer.optimizers], **named, **self._extra_objects)
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

    def _record_completed(self, trainer: Trainer) -> None:
        """Record the completed batches of all epochs."""
        _completed[self._run] = int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)

    def _finish_step(self, trainer: Trainer) -> None:
        """Finish a step only if there was an update: accumulated gradients are in no version."""
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            next(self._steps)
