"""Trains a small GPT-2 with the Trainer of transformers, which evaluates after each epoch.

    python examples/train_transformers.py                      one process, nothing else
    everstep-launch --nproc-per-node 2 examples/train_transformers.py          two that survive

The lines that Everstep needs are marked.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from final_line import print_final
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import everstep  # everstep
from everstep_trainer.integrations.transformers import attach  # everstep

SAMPLES, WORDS, LENGTH, BATCH = 256, 37, 8, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="updates in all")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


ARGS = arguments()


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Token sequences, each a function of its number."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * 7 + index) % WORDS
        return {"input_ids": tokens, "labels": tokens}


class PacedTrainer(Trainer):
    """Sleeps in each step, and keeps the loss of the last update in a buffer of the model."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        time.sleep(ARGS.pace)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.accelerator.unwrap_model(model).loss = loss.detach().clone()
        return loss


def train(run: everstep.Run) -> None:  # everstep
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        "out",
        max_steps=ARGS.steps,
        per_device_train_batch_size=BATCH,
        eval_strategy="epoch",
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=17,
    )
    torch.manual_seed(17)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2))
    model.register_buffer("loss", torch.zeros(()))
    trainer = PacedTrainer(model, arguments, train_dataset=Texts(SAMPLES), eval_dataset=Texts(16))
    attach(trainer, run)  # everstep
    trainer.train()
    print_final(run.rank, trainer.state.global_step, model.loss, model)


if __name__ == "__main__":
    everstep.main(train)  # everstep
