"""Trains a byte-level GPT with DeepSpeed's ZeRO, stages 0 to 3.

    torchrun --nproc-per-node 3 examples/train_deepspeed.py --stage 2                              three processes
    python -m everstep_trainer.launch --nproc-per-node 3 examples/train_deepspeed.py --stage 2     three that survive

The lines that Everstep needs are marked ``# everstep``.
"""

from __future__ import annotations

import argparse
import time

import deepspeed
import torch
from corpus import Windows, standard_library
from final_line import digest, print_line
from gpt import GPT, GPTConfig, next_byte_loss

import everstep  # everstep
from everstep_trainer.integrations.deepspeed import micro_batches, reset_deepspeed, track_engine  # everstep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="updates in all")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--batch", type=int, default=12, help="samples of a micro-batch, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One window of the corpus per index, as inputs and targets."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._windows[torch.tensor([index])]
        return inputs[0], targets[0]


SEED = 17
ARGS = arguments()
DATASET = Samples(Windows(standard_library(), ARGS.context))  # out here: read once, not in each generation
CONFIG = {
    "gradient_accumulation_steps": ARGS.accumulate,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "zero_optimization": {"stage": ARGS.stage, "stage3_param_persistence_threshold": 100},
    "steps_per_print": None,
} | ({} if ARGS.dtype == "fp32" else {ARGS.dtype: {"enabled": True}})


class LastLoss:
    """The mean loss of the last update, tracked so that it survives a loss after that update."""

    value = float("nan")

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, stored: dict[str, float]) -> None:
        self.value = stored["value"]


def train(run: everstep.Run) -> None:  # everstep
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    config = reset_deepspeed(run, CONFIG, global_batch=ARGS.batch)  # everstep
    model = GPT(GPTConfig(layers=2, width=ARGS.width, context=ARGS.context))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = run.loader(DATASET, global_batch=ARGS.batch, seed=SEED)  # everstep
    last = LastLoss()
    track_engine(run, engine, last=last)  # everstep
    for step in run.steps(until=ARGS.steps, seed=SEED):  # everstep
        losses = []
        for (inputs, targets), weight in micro_batches(engine, loader, step):  # everstep
            loss = next_byte_loss(engine(inputs.to(run.device)).float(), targets.to(run.device))
            engine.backward(loss * weight)
            engine.step()
            losses.append(run.mean(loss, weight))
        last.value = torch.stack(losses).mean().item()
        run.report(loss=last.value)
        time.sleep(ARGS.pace)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        print_line(run.rank, ARGS.steps, last.value, digest(engine.module.named_parameters()))


if __name__ == "__main__":
    everstep.main(train)  # everstep
