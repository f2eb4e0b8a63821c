"""A Trainer of PyTorch Lightning's in a training function; ranks write down what each step had.

python -m trainer_hooks.launch --nproc-per-node 2 -m tests.support.lightning_training FOLDER UNTIL [RANK:STEP:POINT ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer

import trainer_hooks as everstep
from tests.support.exact_training import SAMPLES, SEED, Diary, Fault, Faults, Net, data, fingerprint, main
from trainer_hooks.integrations.lightning import Batches, KeepState, Ranks

BATCH = 8


class Module(LightningModule):
    def __init__(self, run: everstep.Run, diary: Diary, dying: Faults) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = Net()
        self._with = (run, diary, dying)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        run, _, dying = self._with
        inputs, targets, self.samples = batch
        dying.step = run.finished + 1
        dying.at("forward")
        return (self.net(inputs) - targets).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        run, diary, dying = self._with
        dying.at("updated")
        step = run.finished + 1
        assert self.trainer.global_step == step
        rate = self.optimizers().param_groups[0]["lr"].hex()
        diary.write(step, samples=self.samples.tolist(), rate=rate, state=fingerprint(self.net.parameters()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    data_set = torch.utils.data.TensorDataset(*data(), torch.arange(SAMPLES))
    loader = run.loader(data_set, global_batch=BATCH, seed=SEED)
    module = Module(run, Diary(Path(folder), run), Faults(faults, Path(folder), run.rank))
    trainer = Trainer(
        max_steps=until,
        accelerator="cpu",
        devices=run.local_world_size,
        strategy="ddp",
        plugins=[Ranks(run)],
        callbacks=[KeepState(run, seed=SEED)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, Batches(run, loader))


if __name__ == "__main__":
    main(train, sys.argv[1:])
