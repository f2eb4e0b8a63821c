"""Small training functions for ranks in processes."""

from __future__ import annotations

import sys
import time
import weakref

import torch
import torch.distributed as dist

from everstep_trainer.run import Run

STEPS = 100_000
PACE_S = 0.01
"""Seconds between steps, which leave CPU time to the code under test."""


def sum_ones(run: Run) -> None:
    """Run one all-reduce in each step. The loss is the number of ranks."""
    for _ in run.steps(until=STEPS):
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        run.report(loss=ones[0])
        time.sleep(PACE_S)


def sum_ones_a_few_times(run: Run) -> None:
    for _ in run.steps(until=20):
        dist.all_reduce(torch.ones(10))


def wait_for_absent_ranks(run: Run) -> None:
    """Let rank 0 wait in a collective that the others never enter, since they wait in Python."""
    for step in run.steps(until=STEPS):
        while step > 1 and run.generation == 1:
            if run.rank == 0:
                dist.all_reduce(torch.ones(1))
            time.sleep(0.01)


def fail_at_step_3(run: Run) -> None:
    for step in run.steps(until=STEPS):
        dist.all_reduce(torch.ones(1))
        if step == 3 and run.rank == 0 and run.generation == 1:
            raise ValueError("a mistake of the user's own")


def fail_like_gloo_at_step_3(run: Run) -> None:
    for step in run.steps(until=STEPS):
        dist.all_reduce(torch.ones(1))
        if step == 3 and run.rank == 0:
            raise RuntimeError("[gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer")


def skip_what_fails(run: Run) -> None:
    """Skip batches that raise, as some scripts skip bad batches."""
    for _ in run.steps(until=STEPS):
        try:
            dist.all_reduce(torch.ones(1000))
            time.sleep(PACE_S)
        except Exception:  # noqa: BLE001 - that is the mistake
            continue


def skip_even_regroup(run: Run) -> None:
    for step in run.steps(until=STEPS):
        try:
            while step > 1 and run.generation == 1:
                time.sleep(0.01)
        except:  # noqa: E722 - that is the mistake
            continue


def give_up_at_step_3(run: Run) -> None:
    for step in run.steps(until=STEPS):
        if step == 3:
            sys.exit(7)


def train_replicas(run: Run) -> None:
    """Train a model in DDP, which is killed inside backward and between steps."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    replicas = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in run.steps(until=STEPS):
        time.sleep(PACE_S)
        loss = replicas(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)


def train_tracked(run: Run) -> None:
    """Train replicas with all state tracked, and 2.1 M parameters as in the benches."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampler = run.sampler(1 << 20, global_batch=32, seed=3)
    run.track(model=replicas, optimizer=optimizer)
    for step in run.steps(until=STEPS, seed=5):
        time.sleep(PACE_S)
        inputs = sampler.indices(step)[:, None].remainder(97).float().expand(-1, 512) / 97
        loss = replicas(inputs).square().mean()
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)


_MODELS: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def count_models(run: Run) -> None:
    """Train with the number of models in this process's memory, over all generations, as the loss."""
    model = torch.nn.Linear(8, 8)
    _MODELS.add(model)
    replicas = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=replicas, optimizer=optimizer)
    for _ in run.steps(until=STEPS):
        replicas(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=float(len(_MODELS)))
        time.sleep(PACE_S)
