"""Run torchtitan's Trainer inside a training function, with its state snapshotted after every update.

Example::

    def train(run):
        config = ConfigManager().parse_args()
        trainer = build_trainer(config, run)
        try:
            trainer.train()
        finally:
            trainer.close()

    everstep.main(train)

A step of the run is one step of the Trainer, with all its microbatches. The Trainer uses the generation's process
group and makes its meshes anew in each generation. torchtitan calls its checkpoint manager at the points where Everstep
has work: before the first step, before each update, and after each step. So the adapter is a checkpoint manager that
also calls the one of the config.

Private parts of torchtitan were read in version 0.3.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep_trainer.integrations.adapter_parts.torchtitan_cpu import reduce_without_factor, use_cpu  # isort: skip - first
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.distributed import utils as titan_distributed
from torchtitan.trainer import Trainer

from everstep_trainer.data.loader import end_workers
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run
from everstep_trainer.state.stateful_loader import PerRankLoader


def build_trainer(
    config: Any, run: Run, *, shared_stream: bool = False, seed: int = 0, **extra_objects: Any
) -> Trainer:
    """Build the config's Trainer so that it continues from the run's last finished step.

    Call it once in each generation. The given config stays as it is.

    Args:
        config: A ``Trainer.Config``, or that of a class derived from Trainer.
        run: The run of the training function.
        shared_stream: Let each data-parallel rank read the whole data and take its share of every step. A run then
            continues on another number of data-parallel ranks, with the same samples in each step. It needs
            ``training.global_batch_size``, and each rank tokenizes all data. Otherwise a rank reads only its own part,
            and the number of data-parallel ranks must stay.
        seed: Seed of the random streams, as for ``Run.steps``.
        extra_objects: Further objects with ``state_dict`` and ``load_state_dict`` to track by name.

    Returns:
        The Trainer. Call ``train`` and then ``close``, also if ``train`` raises.

    Raises:
        ValueError: The config saves checkpoints from another process, or has no global batch size for a shared stream.
    """
    _check(config, shared_stream)
    config = copy.deepcopy(config)  # building a model changes its config
    if run.device.type == "cpu":
        use_cpu(config)
    if not run.distributed:
        _describe_single_rank(run)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the process group
    if run.generation or not hasattr(torch.distributed, "set_timeout"):  # which torch 2.13 does not have
        titan_distributed.set_pg_timeouts = _keep_timeouts
    if shared_stream:
        microbatches = 1
        if config.parallelism.pipeline_parallel_degree > 1:
            microbatches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        config.dataloader = SharedStream.Config(inner=config.dataloader, microbatches=microbatches)
    trainer: Trainer = config.build()
    if run.device.type == "cpu":
        for part in trainer.model_parts:
            reduce_without_factor(part)
    trainer.checkpointer = _StepKeeper(trainer, run, seed, extra_objects)
    _report_losses(trainer, run)
    _name_work(trainer, run)
    return trainer


def _check(config: Any, shared_stream: bool) -> None:
    """Raise ValueError for a config that cannot be kept."""
    if getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        raise ValueError(
            "checkpoint.async_mode=async_with_pinned_mem saves from a process that keeps the ranks of an earlier "
            'generation: use "async" or "disabled"'
        )
    if shared_stream and config.training.global_batch_size < 0:
        raise ValueError(
            "shared_stream needs training.global_batch_size: the default grows with the number of data-parallel ranks"
        )


def _describe_single_rank(run: Run) -> None:
    """Set the variables from which torchtitan makes a process group, for a script that plain Python started."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def _keep_timeouts(*arguments: object, **options: object) -> None:
    """Replace ``set_pg_timeouts``: the time-outs of a generation's collectives are Everstep's."""


def _report_losses(trainer: Trainer, run: Run) -> None:
    """Report the losses that the Trainer logs; in a pipeline only the last stage has one."""
    log = trainer.metrics_processor.log

    def report(step: int, global_avg_loss: float, *arguments: Any, **options: Any) -> None:
        if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
            run.report(loss=global_avg_loss)
        log(step, global_avg_loss, *arguments, **options)

    trainer.metrics_processor.log = report


def _name_work(trainer: Trainer, run: Run) -> None:
    """Declare the work for which other ranks may wait; checkpoints are `_StepKeeper`'s."""
    work_alone(run, trainer.metrics_processor, log="logging")
    if trainer.config.validator.enable:
        work_alone(run, trainer.validator, validate="validation")


# ---- the points of a step


class _StepKeeper(BaseCheckpointManager):
    """The Trainer's checkpoint manager: restores and keeps its state in memory, and calls the config's own manager.

    A checkpoint is saved before its step counts as finished, so a rank that dies while saving repeats the step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Unused: ``build_trainer`` makes the manager."""

    def __init__(self, trainer: Trainer, run: Run, seed: int, extra_objects: Mapping[str, Any]) -> None:
        self.enable, self.save_future = True, None
        self._trainer, self._run, self._seed, self._extra_objects = trainer, run, seed, extra_objects
        self._inner = trainer.checkpointer

    def _load(self, step: int = -1) -> bool:
        """Restore the state, from a checkpoint only if no version in memory is certain, and begin the next step."""
        loaded = not self._run._context.will_restore and self._inner.load(step)
        self._track()
        if self._trainer.should_continue_training():
            self._begin_step()
        return loaded or self._run.last_finished_step > 0

    def _maybe_wait_for_staging(self) -> None:
        """Wait, right before the optimizers' steps, until tracked state may change."""
        self._inner.maybe_wait_for_staging()
        self._run.before_update()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        with self._run.alone("checkpoint"):
            saved = self._inner.save(curr_step, last_step)
        self._run.step_finished()
        if self._trainer.should_continue_training():
            self._begin_step()
        return bool(saved)

    def _wait_for_saving(self) -> None:
        """Do nothing: this manager has no future, and never gets here."""

    def _close(self) -> None:
        self._inner.close()
        if isinstance(self._trainer.dataloader, SharedStream):  # a run ends the workers of tracked loaders only
            end_workers(getattr(self._trainer.dataloader.inner, "_iterator", None))

    def _begin_step(self) -> None:
        # A checkpoint of torchtitan that was loaded may be ahead of the run's steps.
        step = max(self._trainer.step, self._run.last_finished_step)
        self._run.seed_step(step + 1, seed=self._seed)

    def _track(self) -> None:
        trainer, run = self._trainer, self._run
        dims = trainer.parallel_dims
        if run.distributed:
            stage = dims.get_mesh("pp") if dims.pp_enabled else 0
            replica = run.data_parallel(dims.get_mesh("batch") if dims.dp_enabled else (0, 1), stage=stage)
            index, count = replica.index, replica.count
        else:
            index, count = 0, 1
        run.track(
            model=[*trainer.model_parts],
            optimizer=[*trainer.optimizers],
            lr_schedulers=trainer.lr_schedulers,
            progress=_TrainerState(trainer),
            dataloader=_loader_state(trainer.dataloader, index, count),
            **self._extra_objects,
        )


class _TrainerState:
    """The Trainer's own state, with the tokens of all ranks instead of this one's, whose number may change."""

    def __init__(self, trainer: Trainer) -> None:
        mesh = trainer.parallel_dims.get_optional_mesh("loss")
        self._trainer, self._ranks = trainer, 1 if mesh is None else mesh.size()

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.state_dict(), "ntokens_seen": self._trainer.ntokens_seen * self._ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict({**state, "ntokens_seen": state["ntokens_seen"] // self._ranks})


# ---- data


class SharedStream(BaseDataLoader):
    """A loader over the whole data that yields this rank's share of each step, in an order that all ranks share.

    Each rank reads all batches and passes on its own. At the end of a step all ranks have read equally far, so any
    rank's state may replace another's, in memory and in torchtitan's checkpoints. With an inner loader of a rank's own
    part, ``training.global_batch_size`` and ``n`` data-parallel ranks, batch ``i`` of a step is one of rank
    ``i // microbatches % n``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The loader's settings, made by ``build_trainer``."""

        inner: BaseDataLoader.Config
        """Loader of the data."""

        microbatches: int = 1
        """Batches that a rank takes in a row: the microbatches of a pipeline, else one."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        self.inner = config.inner.build(dp_world_size=1, dp_rank=0, **options)
        self._run_length, self._index, self._count = config.microbatches, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.inner)
        first, last = self._index * self._run_length, (self._index + 1) * self._run_length
        while True:
            taken: list[Any] = []
            for number in range(self._count * self._run_length):
                batch = next(batches, None)
                if batch is None:
                    return
                if first <= number < last:
                    taken.append(batch)
            yield from taken

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class _PlainState:
    """A torchtitan loader's state without the pickle in which torchtitan wraps it: it may come from another node."""

    def __init__(self, loader: StatefulDataLoader[Any]) -> None:
        self._loader = loader

    @property
    def _iterator(self) -> Any:
        """The iterator, whose workers end with the generation."""
        return self._loader._iterator

    def state_dict(self) -> dict[str, Any]:
        return StatefulDataLoader.state_dict(self._loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self._loader, state)


def _loader_state(loader: BaseDataLoader, index: int, count: int) -> Any:
    """Return the object to track for a loader: equal on all ranks if the stream is shared, else one rank's own."""
    inner = loader.inner if isinstance(loader, SharedStream) else loader
    state = _PlainState(inner) if isinstance(inner, StatefulDataLoader) else inner
    return state if isinstance(loader, SharedStream) else PerRankLoader(state, index, count)
