"""Train a GPT-2 of 1.9 M parameters under Everstep with the Trainer of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import everstep
from bench.recovery_rows.everstep_trainers import Diary
from everstep_trainer.integrations.transformers import attach, reset_accelerate

SAMPLES, BATCH, WORDS, LENGTH, EMBEDDING, BLOCKS, HEADS = 4096, 8, 512, 16, 192, 4, 4


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences, each a function of its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * 7 + int(index)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


class Tell(TrainerCallback):  # type: ignore[misc]  # transformers is not always installed
    """Tells a Diary where steps begin and end."""

    def __init__(self, run: everstep.Run, model: nn.Module) -> None:
        self._diary = Diary(run, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._diary.step_begins(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._diary.step_ends(state.global_step)


def train(run: everstep.Run) -> None:
    torch.set_num_threads(1)
    reset_accelerate()
    arguments = TrainingArguments(
        os.path.join(os.environ["BENCH_FOLDER"], "out"),
        max_steps=int(os.environ["BENCH_STEPS"]),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": EMBEDDING, "n_layer": BLOCKS, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **shape))
    trainer = Trainer(model, arguments)
    trainer.add_callback(Tell(run, model))
    attach(trainer, run, run.loader(Texts(), global_batch=BATCH * run.world_size))
    trainer.train()


if __name__ == "__main__":
    everstep.main(train)
