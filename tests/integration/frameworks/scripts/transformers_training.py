"""A Trainer of transformers in a training function, whose ranks log each update.

    everstep-launch ... -m tests.integration.frameworks.scripts.transformers_training FOLDER UNTIL [RANK:STEP:POINT ...]

A STEP is an update, of TRANSFORMERS_ACCUMULATES batches. With TRANSFORMERS_FSDP the model is sharded by accelerate.
With TRANSFORMERS_EPOCHS the Trainer takes its own batches, of EPOCH_SAMPLES in each epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import everstep
from everstep_trainer.integrations.transformers import attach
from tests.support.ranks.exact_training import SAMPLES, SEED, Fault, FaultInjector, StepLog, fingerprint, main

BATCH, WORDS, LENGTH = 8, 37, 6
FSDP = bool(os.environ.get("TRANSFORMERS_FSDP"))
EPOCHS = bool(os.environ.get("TRANSFORMERS_EPOCHS"))
EPOCH_SAMPLES = 44
ACCUMULATES = int(os.environ.get("TRANSFORMERS_ACCUMULATES", "1"))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts that are a function of their number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * 7 + int(index)) % WORDS
        return {"input_ids": words, "labels": words, "number": torch.tensor(int(index))}


class LoggedTrainer(Trainer):
    """A Trainer that logs each update, and dies at requested points."""

    def attach_log(self, step_log: StepLog, injector: FaultInjector) -> LoggedTrainer:
        self._step_log, self._injector = step_log, injector
        self._samples: list[int] = []
        self.add_callback(_LogUpdates(self))
        return self

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        self._samples += inputs.pop("number").tolist()
        self._injector.step = self.state.global_step + 1
        self._injector.at("forward")
        return super().compute_loss(model, inputs, **options)

    def log_update(self) -> None:
        rate = self.lr_scheduler.get_last_lr()[0].hex()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters())
        state = fingerprint(whole)
        samples, self._samples = self._samples, []
        self._injector.at("updated")
        self._step_log.write(self.state.global_step, samples=samples, rate=rate, state=state)


class _LogUpdates(TrainerCallback):
    def __init__(self, trainer: LoggedTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.log_update()


def shard(trainer: Trainer) -> None:
    """Shard the model as accelerate does on GPUs, since it skips FSDP on CPUs."""
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    trainer.is_fsdp_enabled = True
    assert trainer.accelerator.is_fsdp2


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        f"{folder}/out",
        max_steps=until,
        per_device_train_batch_size=BATCH // run.world_size,
        remove_unused_columns=False,
        gradient_accumulation_steps=ACCUMULATES,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
        fsdp=FSDP or None,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]} if FSDP else None,
    )
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2))
    trainer = LoggedTrainer(model, arguments, train_dataset=Texts(EPOCH_SAMPLES) if EPOCHS else None)
    if FSDP:
        shard(trainer)
    loader = None if EPOCHS else run.loader(Texts(), global_batch=BATCH, seed=SEED)
    trainer.attach_log(StepLog(Path(folder), run), FaultInjector(faults, Path(folder), run.rank))
    attach(trainer, run, loader, seed=SEED)
    trainer.train()


if __name__ == "__main__":
    main(train, sys.argv[1:])
