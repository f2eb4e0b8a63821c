"""A Trainer of transformers' in a training function; ranks write down what each update had.

    everstep-launch --nproc-per-node 2 -m tests.support.transformers_training FOLDER UNTIL [RANK:STEP:POINT ...]

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
from everstep_trainer.integrations.transformers import attach
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import everstep
from tests.support.exact_training import SAMPLES, SEED, Diary, Fault, Faults, fingerprint, main

BATCH, WORDS, LENGTH = 8, 37, 6
FSDP = bool(os.environ.get("TRANSFORMERS_FSDP"))
EPOCHS = bool(os.environ.get("TRANSFORMERS_EPOCHS"))
EPOCH_SAMPLES = 44
ACCUMULATES = int(os.environ.get("TRANSFORMERS_ACCUMULATES", "1"))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each a function of its number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * 7 + int(index)) % WORDS
        return {"input_ids": words, "labels": words, "number": torch.tensor(int(index))}


class Told(Trainer):
    """Says what each update had, and dies where told."""

    def tell(self, diary: Diary, dying: Faults) -> Told:
        self._told = (diary, dying)
        self._samples: list[int] = []
        self.add_callback(_Tell(self))
        return self

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **how: Any) -> Any:
        self._samples += inputs.pop("number").tolist()
        _, dying = self._told
        dying.step = self.state.global_step + 1
        dying.at("forward")
        return super().compute_loss(model, inputs, **how)

    def told(self) -> None:
        diary, dying = self._told
        rate = self.lr_scheduler.get_last_lr()[0].hex()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters())
        state = fingerprint(whole)
        samples, self._samples = self._samples, []
        dying.at("updated")
        diary.write(self.state.global_step, samples=samples, rate=rate, state=state)


class _Tell(TrainerCallback):
    def __init__(self, trainer: Told) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.told()


def shard(trainer: Trainer) -> None:
    """What accelerate does by itself where there are GPUs: on CPUs it passes FSDP over."""
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
    trainer = Told(model, arguments, train_dataset=Texts(EPOCH_SAMPLES) if EPOCHS else None)
    if FSDP:
        shard(trainer)
    loader = None if EPOCHS else run.loader(Texts(), global_batch=BATCH, seed=SEED)
    trainer.tell(Diary(Path(folder), run), Faults(faults, Path(folder), run.rank))
    attach(trainer, run, loader, seed=SEED)
    trainer.train()


if __name__ == "__main__":
    main(train, sys.argv[1:])
