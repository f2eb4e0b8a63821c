"""Trains a classifier with Lightning's Trainer.

    python examples/train_lightning.py                      one process, nothing else
    everstep-launch --nproc-per-node 2 examples/train_lightning.py          two that survive

The lines that Everstep needs are marked.
"""

from __future__ import annotations

import argparse
import time

import torch
from final_line import print_final
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import everstep  # everstep
from everstep_trainer.integrations.lightning import everstep_strategy  # everstep

SAMPLES, FEATURES, CLASSES, BATCH = 256, 16, 4, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="updates in all")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


ARGS = arguments()


class Classifier(LightningModule):
    """Two layers with dropout, a schedule and a validation loop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, CLASSES)
        )
        self.register_buffer("loss", torch.zeros(()))  # of the last update

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(ARGS.pace)
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.loss = loss.detach().clone()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ARGS.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def train(run: everstep.Run) -> None:  # everstep
    seed_everything(17)
    torch.set_num_threads(1)
    model = Classifier()
    trainer = Trainer(
        max_steps=ARGS.steps,
        max_epochs=-1,
        strategy=everstep_strategy(run),  # everstep
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data(1), batch_size=BATCH, shuffle=True), DataLoader(data(2), batch_size=BATCH))
    print_final(run.rank, trainer.global_step, model.loss, model)


if __name__ == "__main__":
    everstep.main(train)  # everstep
