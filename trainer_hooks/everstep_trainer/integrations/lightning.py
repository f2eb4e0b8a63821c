"""PyTorch Lightning inside a training function: its Trainer's whole state is kept after every update, and restored.

    def train(run):
        loader = run.loader(dataset, global_batch=64, seed=1, num_workers=2)
        trainer = Trainer(
            max_steps=10_000, accelerator="auto", devices=run.local_world_size, num_nodes=..., strategy="ddp",
            plugins=[EverstepEnvironment(run)],
            callbacks=[EverstepCallback(run, seed=1)], enable_checkpointing=False,
        )
        trainer.fit(Model(), RemainingBatches(run, loader))

A step of the run ends with an update of Lightning's (``trainer.global_step``): it is a batch, or as many as
``accumulate_grad_batches`` says. Gradients are not kept, so a restored run computes all batches of an update again.
Lightning finds the process group that the generation has, and uses it; Regroup passes through ``fit`` as through any
function. Works with the package ``pytorch_lightning`` and with ``lightning`` (``lightning.pytorch``).
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
"""Those that are installed. Both hold the same classes, and a Trainer refuses callbacks of the other one."""

if not PACKAGES:
    raise ModuleNotFoundError(
        "PyTorch Lightning is not installed: pip install lightning, or pip install pytorch-lightning"
    )


def _classes(module: str, name: str) -> tuple[Any, ...]:
    """The class of that name in each installed package."""
    return tuple(getattr(importlib.import_module(package + module), name) for package in PACKAGES)


def _base(module: str, name: str) -> Any:
    """One class that is the class of that name in each installed package, so that every Trainer takes it."""
    return types.new_class(name, _classes(module, name))


_DDP_STRATEGIES = _classes(".strategies", "DDPStrategy")

if not TYPE_CHECKING:
    Callback = _base("", "Callback")
    ClusterEnvironment = _base(".plugins.environments", "ClusterEnvironment")


class EverstepEnvironment(ClusterEnvironment):
    """Who this process is. Everstep has started it, and gives and takes process groups."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Nobody meets there."""
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
        """Nothing: it is the generation's."""

    def global_rank(self) -> int:
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it is the generation's."""

    def local_rank(self) -> int:
        return self._run.local_rank

    def node_rank(self) -> int:
        return self._run.rank // self._run.local_world_size


_completed: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
"""Batches that Lightning has completed, where an EverstepCallback says so: RemainingBatches, made before the Trainer,
goes on there."""


class RemainingBatches:
    """The batches of ``run.loader`` from the first that is still to do, without end: let ``max_steps`` end it.

    Batch n is that of the loader's step n, however many of them are accumulated.
    """

    def __init__(self, run: Run, loader: Loader) -> None:
        self._run = run
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return map(self._loader.batch, itertools.count(_completed.get(self._run, self._run.last_finished_step) + 1))


class _Progress:
    """How far Lightning's loops are."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)

    @property
    def completed(self) -> int:
        """Batches, over all epochs."""
        return int(self._loop.epoch_loop.batch_progress.total.completed)


class EverstepCallback(Callback):
    """Tracks model, optimizers, schedulers, loss scaler and progress, and finishes a step of the run with each update.

    ``seed``: of what is drawn at random, as of ``run.steps``. ``extra_objects``: what else is to be kept, such as
    callbacks."""

    def __init__(self, run: Run, *, seed: int = 0, **extra_objects: Any) -> None:
        self._run = run
        self._seed = seed
        self._extra_objects = extra_objects
        self._steps: Iterator[int] = iter(())
        self._updates = -1  # of Lightning's when the running step began; before the first: none is equal

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the strategy has set model and optimizers up, and before loops and data are."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        named: dict[str, Any] = {f"scheduler{index}": scheduler for index, scheduler in enumerate(schedulers)}
        if trainer.precision_plugin.state_dict():
            named["precision"] = trainer.precision_plugin
        model = trainer.strategy.model if isinstance(trainer.strategy, _DDP_STRATEGIES) else pl_module
        progress = _Progress(trainer)
        self._run.track(model=model, optimizer=[*trainer.optimizers], progress=progress, **named, **self._extra_objects)
        _completed[self._run] = progress.completed
        self._updates = -1
        self._steps = self._run.steps(until=sys.maxsize, seed=self._seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Only now Lightning counts the batch before this one as completed."""
        self._finish_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was fetched ahead for the epoch is fetched again for the next."""
        _completed[self._run] = _Progress(trainer).completed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_step(trainer)

    def _finish_step(self, trainer: Trainer) -> None:
        """Where there was an update: gradients that only wait for one are in no version."""
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            next(self._steps)
