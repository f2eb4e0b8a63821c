"""A PyTorch Lightning Trainer in a training function, whose ranks log each step.

    everstep-launch ... -m tests.integration.frameworks.scripts.lightning_training FOLDER UNTIL [RANK:STEP:POINT ...]

A STEP is a batch. LIGHTNING_ACCUMULATES: number of batches for an update, in half precision with a growing loss scaler;
by default one batch, in single precision. LIGHTNING_EPOCHS: "ddp" or "fsdp2", to train epochs over a DataLoader with
this strategy.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everstep
from everstep_trainer.integrations.lightning import (
    EverstepCallback,
    EverstepEnvironment,
    RemainingBatches,
    everstep_strategy,
)
from tests.support.ranks.exact_training import (
    SAMPLES,
    SEED,
    Fault,
    FaultInjector,
    Net,
    StepLog,
    data,
    fingerprint,
    main,
)

LIGHTNING = importlib.import_module("pytorch_lightning")
LightningModule: Any = LIGHTNING.LightningModule
LIGHTNING_STRATEGIES = importlib.import_module(f"{LIGHTNING.__name__}.strategies")
MixedPrecision = importlib.import_module(f"{LIGHTNING.__name__}.plugins.precision").MixedPrecision

BATCH = 8
ACCUMULATES = int(os.environ.get("LIGHTNING_ACCUMULATES", "1"))
EPOCHS = os.environ.get("LIGHTNING_EPOCHS", "")
FEW = 44
"""Samples of an epoch if the script has its own epochs: five batches and a half."""


class Module(LightningModule):
    def __init__(self, step_log: StepLog, injector: FaultInjector) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = Net()
        self._test_hooks = (step_log, injector)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        _, injector = self._test_hooks
        inputs, targets, self.samples = batch
        injector.step = self._number
        injector.at("forward")
        return (self.net(inputs) - targets).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step_log, injector = self._test_hooks
        injector.at("updated")
        assert self.trainer.global_step == self._number // ACCUMULATES
        rate = self.optimizers().param_groups[0]["lr"].hex()
        scale = self.trainer.precision_plugin.state_dict().get("scale")
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.net.parameters())
        state = fingerprint(whole)
        step_log.write(self._number, samples=self.samples.tolist(), rate=rate, scale=scale, state=state)

    @property
    def _number(self) -> int:
        """Return the number of the batch, from 1."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.completed + 1

    def configure_model(self) -> None:
        if EPOCHS == "fsdp2":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if EPOCHS and batch_idx == 0:
            step_log, _ = self._test_hooks
            step_log.write(self._number - 1, validated=self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    data_set = torch.utils.data.TensorDataset(*data(), torch.arange(SAMPLES))
    loader = run.loader(data_set, global_batch=BATCH, seed=SEED)
    module = Module(StepLog(Path(folder), run), FaultInjector(faults, Path(folder), run.rank))
    if EPOCHS:
        train_epochs(run, module, data_set)
        return
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    mixed = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if ACCUMULATES > 1 else []
    trainer = LIGHTNING.Trainer(
        max_steps=until // ACCUMULATES,
        accumulate_grad_batches=ACCUMULATES,
        accelerator="cpu",
        devices=run.local_world_size,
        strategy="ddp",
        plugins=[EverstepEnvironment(run), *mixed],
        callbacks=[EverstepCallback(run, seed=SEED)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, RemainingBatches(run, loader))


def train_epochs(run: everstep.Run, module: Module, data_set: torch.utils.data.Dataset[Any]) -> None:
    data_set = torch.utils.data.Subset(data_set, range(FEW))
    kind = LIGHTNING_STRATEGIES.ModelParallelStrategy if EPOCHS == "fsdp2" else None
    trainer = LIGHTNING.Trainer(
        max_epochs=3,
        num_sanity_val_steps=0,
        strategy=everstep_strategy(run, kind, seed=SEED),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loader = torch.utils.data.DataLoader(data_set, batch_size=BATCH // run.world_size, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(data_set, batch_size=11))


if __name__ == "__main__":
    main(train, sys.argv[1:])
