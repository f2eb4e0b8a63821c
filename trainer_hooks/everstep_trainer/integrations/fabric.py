"""Run a loop over Lightning Fabric inside a training function, with its state snapshotted after every update.

Example::

    def train(run):
        fabric = Fabric(strategy=everstep_strategy(run))
        model, optimizer = fabric.setup(model, optimizer)
        loader = track(fabric, run, DataLoader(dataset, batch_size=8, shuffle=True), model=model, optimizer=optimizer)
        for epoch in loader.epochs(3):
            for batch in loader:
                fabric.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()

Fabric uses the generation's process group. Works with the packages ``lightning_fabric`` and ``lightning``
(``lightning.fabric``). Private names were read in Lightning 2.6.
"""

from __future__ import annotations

from typing import Any

import torch

from everstep_trainer.data.epochs import EpochLoader
from everstep_trainer.integrations.adapter_parts.lightning_packages import (
    RunStrategyMixin,
    classes,
    installed,
    make_strategy,
    package_in_use,
)
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run

__all__ = ["PACKAGES", "everstep_strategy", "track"]

PACKAGES = installed(("lightning", ".fabric"), ("lightning_fabric", ""))
"""The installed packages. Both define the same classes, and a Fabric refuses the other package's strategies."""


class _FabricStrategy(RunStrategyMixin):
    """A Fabric's strategy on a run."""

    exact = True
    loader: EpochLoader | None = None

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if not hasattr(self, "_ddp_kwargs") or not self.run.distributed:
            wrapped: torch.nn.Module = super().setup_module(module)  # type: ignore[misc]  # the strategy's
            return wrapped
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        return self.run.replicate(module, exact=self.exact, **({"device_ids": device_ids} | self._ddp_kwargs))

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Weight the loss where ranks have shares of different sizes."""
        weight = 1.0 if self.loader is None else self.loader.loss_weight
        super().backward(tensor if weight == 1.0 else tensor * weight, module, *args, **kwargs)  # type: ignore[misc]


def everstep_strategy(run: Run, kind: type | None = None, *, exact: bool = True, **options: Any) -> Any:
    """Return a strategy that runs a Fabric on a run; its ``devices`` and ``num_nodes`` are ignored.

    Args:
        run: The run of the training function.
        kind: Fabric's class; default: DDPStrategy. ModelParallelStrategy for FSDP2, with ``fully_shard`` in its
            ``parallelize_fn``.
        exact: As for ``Run.replicate``; for DDPStrategy only.
        options: Passed to Fabric's class.

    Raises:
        TypeError: ``kind`` is FSDPStrategy, whose state cannot be restored.
    """
    if kind is None:
        (kind,) = classes((package_in_use(PACKAGES),), ".strategies", "DDPStrategy")
    assert kind is not None
    strategy = make_strategy(run, _FabricStrategy, kind, options)
    strategy.exact = exact
    return strategy


def track(
    fabric: Any,
    run: Run,
    loader: Any,
    *,
    seed: int = 0,
    global_batch: int | None = None,
    accumulates: int = 1,
    **objects: Any,
) -> EpochLoader:
    """Track what ``Fabric.setup`` returned, restore it, and return the loader to iterate over.

    Args:
        fabric: The Fabric, with a strategy of ``everstep_strategy``.
        run: The run of the training function.
        loader: The training DataLoader, before or after ``Fabric.setup_dataloaders``.
        seed: Seed of the shuffle and of the random streams.
        global_batch: Samples of a batch over all ranks; default: the loader's batch on each rank.
        accumulates: Batches of one update. The last update of an epoch may have fewer.
        objects: The models, optimizers, schedules and other objects to track, by name, as for ``Run.track``.

    Returns:
        The epochs of the loader, on Fabric's device.

    Raises:
        ValueError: As for ``Run.epoch_loader`` and ``Run.track``.
        TypeError: As for ``Run.track``.
    """
    loader = getattr(loader, "_dataloader", loader)
    epochs = run.epoch_loader(
        loader, global_batch=global_batch, seed=seed, accumulates=accumulates, place=fabric.to_device
    )
    named = {name: _unwrapped(tracked) for name, tracked in objects.items()}
    if fabric.strategy.precision.state_dict():  # a loss scaler
        named.setdefault("precision", fabric.strategy.precision)
    run.track(**named)
    fabric.strategy.loader = epochs
    work_alone(run, fabric, log_dict="logging")  # which ``log`` calls; its strategy declares checkpoints
    return epochs


def _unwrapped(tracked: Any) -> Any:
    """Return the module or optimizer inside Fabric's wrapper; any other object as it is."""
    if isinstance(tracked, list | tuple):
        return [_unwrapped(item) for item in tracked]
    if type(tracked).__name__.endswith("FabricModule"):
        return tracked._forward_module
    return (
        tracked.optimizer if type(tracked).__name__.startswith("Fabric") and hasattr(tracked, "optimizer") else tracked
    )
