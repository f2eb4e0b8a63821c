"""Train the model of ``bench.recovery_rows.workload`` under Everstep with Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer

import everstep
from bench.recovery_rows.everstep_trainers import Diary
from bench.recovery_rows.workload import BATCH, WIDTH, build_model
from everstep_trainer.integrations.lightning import EverstepCallback, EverstepEnvironment, RemainingBatches

SAMPLES = 4096


class Module(LightningModule):  # type: ignore[misc]  # Lightning is not always installed
    """The workload with AdamW."""

    def __init__(self, run: everstep.Run) -> None:
        super().__init__()
        self.net = build_model()
        self.diary = Diary(run, self.net)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.diary.step_begins(self.trainer.global_step + 1)
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.diary.step_ends(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters())


def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    samples = torch.utils.data.TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        max_steps=int(os.environ["BENCH_STEPS"]),
        accelerator="cpu",
        devices=run.local_world_size,
        strategy="ddp",
        plugins=[EverstepEnvironment(run)],
        callbacks=[EverstepCallback(run)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Module(run), RemainingBatches(run, run.loader(samples, global_batch=BATCH * run.world_size)))


if __name__ == "__main__":
    everstep.main(train)
