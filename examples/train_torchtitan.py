"""Trains two layers of torchtitan's Llama 3 debug model on sentences that the script makes.

    torchrun --nproc-per-node 2 examples/train_torchtitan.py --steps 50
    everstep-launch --nproc-per-node 2 examples/train_torchtitan.py --steps 50   survives lost ranks
    ... --parallelism.tensor_parallel_degree 2

Further arguments are torchtitan's. The lines of Everstep are marked. At the end rank 0 prints the last loss and a
digest of the parameters.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from final_line import digest, print_line
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

import everstep  # everstep
from everstep_trainer.integrations.torchtitan import build_trainer  # everstep

LAYERS, LENGTH, BATCH = 2, 32, 4  # small enough for CPUs
RECIPE = ["--module", "llama3", "--config", "llama3_debugmodel", "--dataloader.dataset", "sentences"]
RECIPE += ["--training.seq_len", str(LENGTH), "--training.local_batch_size", "1"]
RECIPE += ["--training.global_batch_size", str(BATCH), "--debug.seed", "1", "--debug.no-enable-structured-logging"]
RECIPE += ["--parallelism.spmd_backend", "partial_dtensor"]  # the default needs a torch after 2.13


def sentences(path: str) -> Dataset:
    words = random.Random(1)
    texts = [" ".join(f"word{words.randrange(50)}" for _ in range(words.randrange(3, 12))) for _ in range(1000)]
    return Dataset.from_list([{"text": text} for text in texts])


class ByteTokenizer(BaseTokenizer):
    """Tokens 0 and 1 begin and end a text; the others are its bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """It has no settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [0] * add_bos + [2 + byte for byte in text.encode()] + [1] * add_eos

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token - 2 for token in tokens if token > 1).decode()

    def get_vocab_size(self) -> int:
        return 258


class LastLoss(BaseLogger):
    """Keeps the last step's loss, and slows the steps down."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s, self.loss = pace_s, 0.0

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.loss = float(metrics["loss_metrics/global_avg_loss"])
        time.sleep(self.pace_s)

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


def train(run: everstep.Run) -> None:  # everstep
    config = ConfigManager().parse_args([*RECIPE, "--training.steps", str(ARGS.steps), *REST])
    config.tokenizer = ByteTokenizer.Config()
    del config.model_spec.model.layers[LAYERS:]
    last = LastLoss(ARGS.pace)
    trainer = build_trainer(config, run, shared_stream=True, last=last)  # everstep, instead of config.build()
    trainer.metrics_processor.logger = last
    try:
        trainer.train()
        parameters = digest(named for part in trainer.model_parts for named in part.named_parameters())
    finally:
        trainer.close()
    print_line(torch.distributed.get_rank(), trainer.step, last.loss, parameters)


DATASETS["sentences"] = DatasetConfig(path="", loader=sentences, sample_processor=lambda sample: sample["text"])

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="updates in total")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step")
    ARGS, REST = parser.parse_known_args()
    torch.set_num_threads(1)
    everstep.main(train)  # everstep
