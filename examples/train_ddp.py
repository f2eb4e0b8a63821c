"""Trains a byte-level GPT with data parallelism.

    python examples/train_ddp.py                                        one process, nothing else
    torchrun --nproc-per-node 4 examples/train_ddp.py                   four
    python -m everstep_trainer.launch --nproc-per-node 4 examples/train_ddp.py   four that survive

What Everstep needs is marked with (1) to (5).
"""

from __future__ import annotations

import argparse

import torch
from corpus import Windows, standard_library
from gpt import GPT, GPTConfig, next_byte_loss, warm_up_and_cosine
from metrics import Metrics

import everstep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step, over all ranks")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--metrics", help="a file for one JSON line per finished step, written by rank 0")
    return parser.parse_args()


ARGS = arguments()
DATASET = Windows(standard_library(), ARGS.context)  # out here: read once, not in each generation


def train(run: everstep.Run) -> None:  # (1) entered once in each generation
    torch.manual_seed(ARGS.seed)
    torch.set_num_threads(ARGS.threads)
    model = GPT(GPTConfig(layers=ARGS.layers, width=ARGS.width, context=ARGS.context)).to(run.device)
    replicas = run.replicate(model)  # (2) or DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ARGS.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(ARGS.steps))
    sampler = run.sampler(len(DATASET), global_batch=ARGS.batch, seed=ARGS.seed)
    metrics = Metrics(ARGS.metrics, run, sampler)
    run.track(model=replicas, optimizer=optimizer, scheduler=scheduler)  # (3) restored when this returns

    for step in run.steps(until=ARGS.steps, seed=ARGS.seed):  # (4) goes on after the restored step
        inputs, targets = (part.to(run.device) for part in DATASET[sampler.indices(step)])
        loss = next_byte_loss(replicas(inputs), targets)
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        metrics.write(step, loss)


if __name__ == "__main__":
    everstep.main(train)  # (5)
