"""Trains a byte-level GPT with its parameters sharded over the ranks (FSDP2).

    torchrun --nproc-per-node 4 examples/train_fsdp2.py
    python -m everstep_trainer.launch --nproc-per-node 4 examples/train_fsdp2.py   survives, on fewer ranks where it
    must

The same five lines as in train_ddp.py; the shards are laid out anew when the number of ranks changes.
"""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig, next_byte_loss, warm_up_and_cosine
from metrics import Metrics
from torch.distributed.fsdp import fully_shard
from train_ddp import ARGS, DATASET

import everstep


def train(run: everstep.Run) -> None:
    torch.manual_seed(ARGS.seed)
    torch.set_num_threads(ARGS.threads)
    model = GPT(GPTConfig(layers=ARGS.layers, width=ARGS.width, context=ARGS.context)).to(run.device)
    if run.distributed:
        for block in model.blocks:
            fully_shard(block, mesh=run.mesh)
        fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ARGS.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(ARGS.steps))
    sampler = run.sampler(len(DATASET), global_batch=ARGS.batch, seed=ARGS.seed)
    metrics = Metrics(ARGS.metrics, run, sampler)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in run.steps(until=ARGS.steps, seed=ARGS.seed):
        inputs, targets = (part.to(run.device) for part in DATASET[sampler.indices(step)])
        loss = next_byte_loss(model(inputs), targets)
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        metrics.write(step, loss)


if __name__ == "__main__":
    everstep.main(train)
