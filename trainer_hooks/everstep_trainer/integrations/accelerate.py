"""Run a training loop over accelerate inside a training function, with its state snapshotted after every update.

Example::

    def train(run):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        loader = track(accelerator, run, loader, model=model, optimizer=optimizer)
        for epoch in loader.epochs(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch))
                    optimizer.step()
                    optimizer.zero_grad()

A step of the run is an update, of ``gradient_accumulation_steps`` batches or fewer at an epoch's end. accelerate uses
the generation's process group. Its process-wide state is dropped before each generation. Private names were read in
accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from everstep_trainer.data.epochs import EpochLoader, is_indexed
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run, before_each_generation


def reset_accelerate() -> None:
    """Drop accelerate's process-wide state: the ranks and devices of the previous generation.

    It is called before each generation once this module is imported.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


before_each_generation(reset_accelerate)


def unprepared(loader: Any) -> tuple[Any, int | None]:
    """Return the DataLoader inside one that accelerate prepared, and its global batch if that is its batch size.

    A loader whose batches cannot be taken by their numbers is returned as it is: accelerate splits it over the ranks.
    """
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader) or not is_indexed(inner):
        return loader, None
    batch_sampler: Any = inner.batch_sampler
    return inner, batch_sampler.batch_size if getattr(batch_sampler, "split_batches", False) else None


def unwrapped(tracked: Any) -> Any:
    """Return the optimizer or schedule inside accelerate's wrapper; any other object as it is."""
    if isinstance(tracked, list | tuple):
        return [unwrapped(item) for item in tracked]
    if isinstance(tracked, AcceleratedOptimizer):
        return tracked.optimizer
    return tracked.scheduler if isinstance(tracked, AcceleratedScheduler) else tracked


class AcceleratedLoader:
    """The epochs of a prepared loader; accelerate sees in it where an epoch ends."""

    remainder = -1  # no batch is filled up with samples of another

    def __init__(self, loader: EpochLoader) -> None:
        self._loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch that are still to do."""
        state = GradientState()
        state._add_dataloader(self)
        try:
            yield from self._loader
        finally:
            state._remove_dataloader(self)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch taken is the epoch's last."""
        return self._loader.is_last_batch

    @property
    def loss_weight(self) -> float:
        """The weight of the last batch, which ``Accelerator.backward`` applies."""
        return self._loader.loss_weight

    def epochs(self, until: int | None = None, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs still to do; see `EpochLoader.epochs`."""
        return self._loader.epochs(until, max_steps=max_steps)


def track(
    accelerator: Accelerator,
    run: Run,
    loader: Any,
    *,
    seed: int = 0,
    global_batch: int | None = None,
    exact: bool = True,
    **objects: Any,
) -> AcceleratedLoader:
    """Track prepared objects, restore them, and return the loader to iterate over.

    A loss scaler, and what ``Accelerator.register_for_checkpointing`` was given, is tracked too.

    Args:
        accelerator: The accelerator, after ``prepare``.
        run: The run of the training function.
        loader: The training loader, prepared or not.
        seed: Seed of the shuffle and of the random streams.
        global_batch: Samples of a batch over all ranks; default: the loader's batch on each rank.
        exact: Add the gradients of a DistributedDataParallel in the order of ranks; see ``Run.exact_gradients``.
        objects: The model, optimizers, schedules and other objects to track, by name, as for ``Run.track``.

    Returns:
        The epochs of the loader.

    Raises:
        ValueError: As for ``Run.epoch_loader`` and ``Run.track``.
        TypeError: As for ``Run.track``.
    """
    given, whole = unprepared(loader)
    epochs = run.epoch_loader(
        given,
        global_batch=global_batch or whole,
        seed=seed,
        accumulates=accelerator.gradient_accumulation_steps,
        place=partial(send_to_device, device=accelerator.device),
    )
    named = {name: unwrapped(tracked) for name, tracked in objects.items()}
    if exact:
        for module in (item for item in named.values() if isinstance(item, torch.nn.Module)):
            run.exact_gradients(module)
    if accelerator.scaler is not None:
        named["scaler"] = accelerator.scaler
    named |= {f"registered{index}": custom for index, custom in enumerate(accelerator._custom_objects)}
    run.track(**named)
    work_alone(run, accelerator, save_state="checkpoint", save_model="saving the model", log="logging")
    backward = accelerator.backward

    def weighted(loss: torch.Tensor, **options: Any) -> None:
        backward(loss if epochs.loss_weight == 1.0 else loss * epochs.loss_weight, **options)

    accelerator.backward = weighted  # of this accelerator only
    return AcceleratedLoader(epochs)
