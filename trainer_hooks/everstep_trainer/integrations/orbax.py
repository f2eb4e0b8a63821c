"""Put the memory tier in front of an Orbax directory: save in each step, restore the newest from memory.

Example::

    def train(run):
        with distributed(run):
            state = initial_state()
            args = ocp.args.StandardSave(state)
            options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
            with MemoryCheckpointManager(run, "/checkpoints", initial=args, options=options) as manager:
                first = 0
                if (latest := manager.latest_step()) is not None:
                    state = manager.restore(latest, args=ocp.args.StandardRestore(state))
                    first = latest + 1
                for step in range(first, 10_000):
                    state = update(state, batch(step))
                    manager.save(step, args=ocp.args.StandardSave(state))

`MemoryCheckpointManager` has the methods of ``orbax.checkpoint.CheckpointManager``. Its ``save`` finishes a step of the
run, so the loop needs no ``run.steps``. Tried with orbax-checkpoint 0.12.8, some of whose private counters begin anew
in each generation (``reset_orbax``), since replaced processes would count differently.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures import signaling_client, synchronization
from orbax.checkpoint._src.multihost import multihost

from everstep_trainer.integrations.jax import Pytree
from everstep_trainer.run import Run

_SINGLE = "default"  # the name of the item if ``args`` is not a Composite


def reset_orbax() -> None:
    """Drop what Orbax remembers of an earlier generation: its client, its operations and its devices."""
    signaling_client.get_signaling_client.cache_clear()
    generator = synchronization.OperationIdGenerator
    generator._operation_id_counter = itertools.count()
    generator._operation_id = next(generator._operation_id_counter)
    multihost._DISTRIBUTED_TO_DEVICE_IDS = multihost._RUNTIME_TO_DISTRIBUTED_ID = None


class MemoryCheckpointManager:
    """A CheckpointManager whose newest checkpoint is in memory, and others in a directory of Orbax.

    Each ``save`` stores the items in the memory tier. Those steps that ``options`` select are also written to
    ``directory``, before ``save`` returns: a thread of Orbax that still wrote after a loss could not be stopped. If
    memory holds nothing, as in a new job, the newest step is the directory's. The manager is made in each generation,
    inside of `everstep_trainer.integrations.jax.distributed`, and calls ``run.track``.

    Args:
        run: The run of the training function.
        directory: Directory of a CheckpointManager; None for memory alone.
        initial: What the first ``save`` would be given as ``args``: it tells structure and shardings. StandardSave,
            PyTreeSave, JsonSave, or a Composite of them.
        options: Options of the CheckpointManager. Saves to the directory are never asynchronous.
        seed: Seed of the random streams of torch, numpy and Python, as for ``Run.steps``.
        objects: Further objects to track by name.

    Raises:
        TypeError: An argument of ``initial`` has no item that can be kept in memory.
    """

    def __init__(
        self,
        run: Run,
        directory: Any,
        *,
        initial: Any,
        options: Any = None,
        seed: int = 0,
        **objects: Any,
    ) -> None:
        reset_orbax()
        self._run, self._seed = run, seed
        self._stored = None
        if directory is not None:
            options = dataclasses.replace(options or ocp.CheckpointManagerOptions(), enable_async_checkpointing=False)
            self._stored = ocp.CheckpointManager(directory, options=options)
        self._is_composite = isinstance(initial, ocp.args.Composite)
        self._checkpoint = Pytree({"step": -1, "items": _items_of(initial)})
        run.track(checkpoint=self._checkpoint, **objects)
        self._begin_step()

    @property
    def directory(self) -> Any:
        """The directory; None without one."""
        return None if self._stored is None else self._stored.directory

    def latest_step(self) -> int | None:
        """Return the step in memory; if there is none, the directory's newest, or None."""
        if (step := self._memory_step) is not None:
            return step
        return None if self._stored is None else self._stored.latest_step()

    def best_step(self) -> int | None:
        """Return the directory's best step; without a directory, the newest in memory."""
        return self._memory_step if self._stored is None else self._stored.best_step()

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return the steps of the directory, and the one in memory."""
        stored = [] if self._stored is None else self._stored.all_steps(read=read)
        memory = [] if self._memory_step is None else [self._memory_step]
        return sorted({*stored, *memory})

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` would store this step: memory stores each."""
        return True

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Store the items in memory and, if ``options`` or ``force`` say so, in the directory; finish the run's step.

        Args:
            step: Number of the step, of the caller's choice.
            items: Not supported, as it is deprecated in Orbax: use ``args``.
            save_kwargs: Not supported, like ``items``.
            metrics: Stored in the directory, to select the best checkpoints.
            force: Also write to the directory, whatever the options say.
            args: The items, as in ``initial``.
            custom_metadata: Stored in the directory.

        Returns:
            True.

        Raises:
            ValueError: ``args`` is missing.
        """
        if args is None or items is not None or save_kwargs is not None:
            raise ValueError("save takes args=..., such as ocp.args.StandardSave(state), in place of items")
        stored = self._stored
        # before memory has the step: after a loss in between, the step is computed and written again
        if stored is not None and step not in stored.all_steps() and (force or stored.should_save(step)):
            with self._run.alone("checkpoint"):
                stored.save(step, metrics=metrics, force=True, args=args, custom_metadata=custom_metadata)
        self._checkpoint.value = {"step": step, "items": _items_of(args)}
        self._run.step_finished()
        self._begin_step()
        return True

    def restore(
        self,
        step: int | None = None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Return the items of a step: from memory if it is there, else from the directory.

        Items from memory have the structure and the shardings of ``initial``; ``args`` selects those of a Composite.

        Args:
            step: The step; None for the newest.
            items: Passed to Orbax, for steps in the directory.
            restore_kwargs: Passed to Orbax, for steps in the directory.
            directory: Another directory to restore from.
            args: As for Orbax, such as ``ocp.args.StandardRestore(state)``.

        Raises:
            FileNotFoundError: There is no such step.
        """
        step = self.latest_step() if step is None and directory is None else step
        if directory is None and step is not None and step == self._memory_step:
            kept = self._checkpoint.value["items"]
            if not self._is_composite:
                return kept[_SINGLE]
            wanted = kept if args is None else args.keys()
            return ocp.args.Composite(**{name: kept[name] for name in wanted})
        if self._stored is None:
            raise FileNotFoundError(f"memory has no step {step}, and there is no directory")
        return self._stored.restore(step, items, restore_kwargs, directory, args)

    def delete(self, step: int) -> None:
        """Delete a step of the directory; memory keeps the newest."""
        if self._stored is not None:
            self._stored.delete(step)

    def reload(self) -> None:
        """Read the steps of the directory again."""
        if self._stored is not None:
            self._stored.reload()

    def reached_preemption(self, step: int) -> bool:
        """Return False: Everstep drains nodes itself, and memory has every step."""
        return False

    def item_metadata(self, step: int) -> Any:
        """Return the metadata of a step in the directory."""
        return self._require_directory().item_metadata(step)

    def metadata(self, step: int | None = None) -> Any:
        """Return the metadata of the directory, or of a step in it."""
        return self._require_directory().metadata(step)

    def metrics(self, step: int) -> Any:
        """Return the metrics of a step in the directory."""
        return self._require_directory().metrics(step)

    def is_saving_in_progress(self) -> bool:
        """Return False: ``save`` returns when everything is stored or copied."""
        return False

    def wait_until_finished(self) -> None:
        """Return at once."""

    def check_for_errors(self) -> None:
        """Do nothing: ``save`` itself raises."""

    def close(self) -> None:
        """Close the CheckpointManager of the directory."""
        if self._stored is not None:
            self._stored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # otherwise closing would wait for lost processes
            self.close()

    @property
    def _memory_step(self) -> int | None:
        step: int = self._checkpoint.value["step"]
        return step if step >= 0 else None

    def _begin_step(self) -> None:
        self._run.seed_step(self._run.last_finished_step + 1, seed=self._seed)

    def _require_directory(self) -> Any:
        if self._stored is None:
            raise FileNotFoundError("there is no directory: memory has no metadata")
        return self._stored


def _items_of(args: Any) -> dict[str, Any]:
    if isinstance(args, ocp.args.Composite):
        return {name: _item(name, argument) for name, argument in args.items()}
    return {_SINGLE: _item(_SINGLE, args)}


def _item(name: str, args: Any) -> Any:
    if not hasattr(args, "item"):
        raise TypeError(f"{name} is a {type(args).__qualname__}, whose item cannot be kept in memory: use StandardSave")
    return args.item
