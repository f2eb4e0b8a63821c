"""Train a small model on real ranks under audits, with faults of one rank's gradients; return what the ranks state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.gradients import gradient_norms
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FAULTY_RANK = 2
FAULTY_STEP = 31
STEPS = 36
REPEATED_FROM = FAULTY_STEP - 3
ODD_TARGETS = {"odd batch": 1e4, "batch of NaN": math.nan}
"""Samples of the faulty step, by fault: no fault, as they are the same when the step is repeated."""
_kept: dict[str, Any] = {}
"""The state before step REPEATED_FROM in this process."""


class RecordingSession(TrainingSession):
    """Keeps statements, begins at ``first_step``."""

    def __init__(self, world: int, first_step: int = 1) -> None:
        self._world, self._first_step = world, first_step
        self.mismatches: list[Mismatch] = []
        self.clean_since: list[int] = []

    def track(self, objects: Any, options: Any) -> int:
        return self._first_step - 1

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"node-{rank}" for rank in range(self._world))

    def report_mismatch(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)

    def report_clean_audits(self, step: int) -> None:
        self.clean_since.append(step)


def tiny_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    data = torch.randn(8, 16, generator=generator)
    return data, data[:, :4].sin()


class FaultyAt:
    """Whether a fault of this rank is active now."""

    def __init__(self, rank: int) -> None:
        self.is_on = rank == FAULTY_RANK
        self.step = 0

    def __bool__(self) -> bool:
        return self.is_on and self.step == FAULTY_STEP


def train_with_fault(rank: int, world: int, layout: str, fault: str, links: Any) -> dict[str, Any]:
    """Train on one rank. Under the fault "gradient", a suspected step is trained once more, in another run."""
    active, session = FaultyAt(rank), RecordingSession(world)
    with _spoiled_transport(active, fault) if fault in ("transport", "sending") else nullcontext():
        trained = _train(rank, world, layout, fault, session, active, links, 1)
    repeated = None
    if fault in ("gradient", *ODD_TARGETS):
        active.is_on = False
        repeated = RecordingSession(world, REPEATED_FROM)
        _train(rank, world, layout, fault, repeated, active, links, REPEATED_FROM)
    _kept.clear()
    gradient_norms._suspected.clear()
    return {
        "mismatches": session.mismatches,
        "clean_since": session.clean_since,
        "repeated": repeated.mismatches if repeated is not None else [],
        "parameters": trained,
    }


@contextmanager
def _spoiled_transport(active: FaultyAt, fault: str) -> Iterator[None]:
    """While the fault is active, flip a bit of what this process receives of others' gradients, or of what it sends."""
    all_to_all = dist.all_to_all_single

    def flipping(output: torch.Tensor, input: torch.Tensor, **more: Any) -> Any:
        if active and fault == "sending":
            input.view(torch.int32)[5] ^= 1
        work = all_to_all(output, input, **more)
        if active and fault == "transport":
            output.view(torch.int32)[5] ^= 1
        return work

    dist.all_to_all_single = flipping
    try:
        yield
    finally:
        dist.all_to_all_single = all_to_all


def _train(
    rank: int, world: int, layout: str, fault: str, session: RecordingSession, active: FaultyAt, links: Any, first: int
) -> list[torch.Tensor]:
    run = Run(RankContext(rank=rank, world_size=world, mesh=lambda: init_device_mesh("cpu", (world,))), session)
    model: nn.Module = tiny_model()
    if layout == "fsdp2":
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = run.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    layers: Any = model.module if layout == "ddp" else model
    if fault == "gradient":
        layers[2].register_forward_hook(partial(_spoil_backward, active))
    if fault == "own hook":  # changes gradients as a program may
        parameters[2].register_post_accumulate_grad_hook(_halve_gradient)
    if first > 1:
        model.load_state_dict(_kept["model"])
        optimizer.load_state_dict(_kept["optimizer"])
    run.track(model=model, optimizer=optimizer, sdc="off", sdc_links=links)
    for step in run.steps(until=first + STEPS - 1 if first == 1 else FAULTY_STEP + 1):
        active.step = step
        if first == 1 and step == REPEATED_FROM:
            _kept.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        data, target = batch_of(rank, step)
        if fault in ODD_TARGETS and rank == FAULTY_RANK and step == FAULTY_STEP:
            target = target * ODD_TARGETS[fault]
        optimizer.zero_grad()
        flip = parameters[2].register_post_accumulate_grad_hook(
            partial(_flip_gradient, bool(active) and fault == "rest")
        )
        nn.functional.mse_loss(model(data), target).backward()
        flip.remove()
        if active and fault == "result":
            parameters[0].grad.view(torch.int32).view(-1)[0] ^= 1  # type: ignore[union-attr]
        optimizer.step()
    run.close()
    return [parameter.detach().clone() for parameter in parameters] if layout == "ddp" else []


def _halve_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad *= 0.5


def _flip_gradient(active: bool, parameter: torch.Tensor) -> None:
    if active and parameter.grad is not None:
        parameter.grad.view(torch.int32).view(-1)[7] ^= 1


def _spoil_backward(active: FaultyAt, _: nn.Module, __: Any, output: torch.Tensor) -> None:
    if active:
        output.register_hook(_spoil)


def _spoil(gradient: torch.Tensor) -> torch.Tensor:
    spoiled = gradient.clone()
    spoiled.view(-1)[3] = 1e6
    return spoiled
