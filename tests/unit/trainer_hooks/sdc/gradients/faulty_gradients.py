"""A small model that ranks train under gradient audits, with faults in the gradients of one rank."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from everstep_trainer.parallel.lane import GlooCommunicator
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.gradients.gradient_exchange import GradientTap
from everstep_trainer.session.generation_session import TrainingSession

FAULTY_RANK = 2
OTHER_RANK = 3
"""The rank whose seat the faulty rank gets after an exchange of seats."""
FAULTY_STEP = 32
STEPS = 37
REPEATED_FROM = FAULTY_STEP - 4
SPOILED_GRADIENTS = {
    "gradient": 1e6,
    "huge gradient": 1e30,
    "NaN gradient": math.nan,
    "permanent NaN gradient": math.nan,
    "overflow under a scaler": math.inf,
    "NaN in one row": math.nan,
}
"""Values of a gradient's element in the faulty step, by fault. Only permanent faults occur in repeated steps."""
REFUSED_LOSSES = ("loss of NaN",)
"""Faults that make the loss NaN from the faulty step on, in training under a guard."""
UNUSUAL_TARGETS = {"odd batch": 1e4, "batch of NaN": math.nan, "batches of NaN": math.nan}
"""Factors of the targets of the faulty step, by fault. No audit may report them, since repeated steps have the same
targets. The last one is on all ranks."""
_groups = itertools.count()
_kept: dict[str, Any] = {}
"""The state in this process before the steps that are repeated."""


class RecordingSession(TrainingSession):
    """A session that records mismatches, and begins at ``first_step``."""

    def __init__(self, world: int, first_step: int = 1) -> None:
        self._world, self.first_step = world, first_step
        self.mismatches: list[Mismatch] = []
        self.clean_since: list[int] = []

    def track(self, objects: Any, options: Any) -> int:
        return self.first_step - 1

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"node-{rank}" for rank in range(self._world))

    def report_mismatch(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)

    def report_clean_audits(self, step: int) -> None:
        self.clean_since.append(step)


def tiny_model() -> nn.Sequential:
    """Return the model, equal on each call."""
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


def train_with_fault(
    rank: int,
    world: int,
    layout: str,
    fault: str,
    audits: Any,
    repetitions: Sequence[str] = (),
    repeated_from: int = REPEATED_FROM,
) -> dict[str, Any]:
    """Train on one rank, and then repeat steps before and after the faulty one in further generations.

    Args:
        repetitions: The seats in each of them, "same seats" or "exchanged seats".
        repeated_from: The first step of each.
    """
    active, session = FaultyAt(rank), RecordingSession(world)
    with _spoiled_transport(active, fault) if fault in ("rest", "transport", "sending") else nullcontext():
        trained = _train(rank, world, layout, fault, session, active, audits, repeated_from)
    mismatches = [session.mismatches]
    active.is_on &= fault.startswith("permanent")
    for seats in repetitions:
        repeated = RecordingSession(world, repeated_from)
        with _exchanged_seats(rank, world) if seats == "exchanged seats" else nullcontext(rank) as now:
            _train(now, world, layout, fault, repeated, active, audits, repeated_from)
        mismatches.append(repeated.mismatches)
    _kept.clear()
    gradient_norms.to_repeat.clear()
    return {"mismatches": mismatches, "clean_since": session.clean_since, "parameters": trained}


@contextmanager
def _exchanged_seats(rank: int, world: int) -> Iterator[int]:
    """Let this process and all others be ranks of a new process group; yield its rank, which two have exchanged."""
    exchanged = {FAULTY_RANK: OTHER_RANK, OTHER_RANK: FAULTY_RANK}.get(rank, rank)
    store = dist.distributed_c10d._get_default_store()
    number = next(_groups)
    for name, now in (("exchanged", exchanged), ("as before", rank)):
        # gloo may reset a connection whose other end still receives, so all ranks have to be done with the group
        if store.add(f"done/{name}/{number}", 1) == world:
            store.set(f"all done/{name}/{number}", "")
        store.wait([f"all done/{name}/{number}"])
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=PrefixStore(f"{name}/{number}", store), rank=now, world_size=world)
        if name == "exchanged":
            yield now


@contextmanager
def _spoiled_transport(active: FaultyAt, fault: str) -> Iterator[None]:
    """While the fault is active, flip a bit of a gradient after it has arrived, or while it is sent or received."""
    all_to_all, on_local = GlooCommunicator.all_to_all, GradientTap.on_local

    def flipping_local(tap: GradientTap, parameters: Any, gradients: Any, sent: torch.Tensor, sizes: Any) -> None:
        if active and fault == "rest":
            sent.view(torch.int32)[5] ^= 1
        on_local(tap, parameters, gradients, sent, sizes)

    def flipping(communicator: GlooCommunicator, received: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> None:
        if active and fault == "sending":
            sent.view(torch.int32)[5] ^= 1
        all_to_all(communicator, received, sent, *sizes)
        if active and fault == "transport":
            received.view(torch.int32)[5] ^= 1

    GlooCommunicator.all_to_all = flipping  # type: ignore[assignment, method-assign]
    GradientTap.on_local = flipping_local  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        GlooCommunicator.all_to_all, GradientTap.on_local = all_to_all, on_local  # type: ignore[method-assign]


def _train(
    rank: int,
    world: int,
    layout: str,
    fault: str,
    session: RecordingSession,
    active: FaultyAt,
    audits: Any,
    repeated_from: int,
) -> list[torch.Tensor]:
    first = session.first_step
    run = Run(RankContext(rank=rank, world_size=world, mesh=lambda: init_device_mesh("cpu", (world,))), session)
    layers = tiny_model()
    model: nn.Module = layers
    if layout == "fsdp2":
        for layer in (layers[0], layers[2], layers[4]):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = run.replicate(model)
    has_scaler = fault.endswith("under a scaler")
    scaler = torch.amp.GradScaler("cpu", enabled=has_scaler)
    # a fused optimizer is called also if the scaler leaves the update out
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=has_scaler)
    parameters = list(model.parameters())
    if fault in SPOILED_GRADIENTS:
        # the first layer has no input gradient, so that only one row of its weight becomes NaN, and one shard of that
        spoiled = layers[0 if fault == "NaN in one row" else 2]
        spoiled.register_forward_hook(partial(_spoil_backward, active, SPOILED_GRADIENTS[fault]))
    if fault == "own hook":  # changes gradients as a program may
        parameters[2].register_post_accumulate_grad_hook(_halve_gradient)
    if first > 1:
        model.load_state_dict(_kept["model"])
        optimizer.load_state_dict(copy.deepcopy(_kept["optimizer"]))  # an optimizer uses the loaded tensors
    guard = run.guard(max_refusals=STEPS) if fault in REFUSED_LOSSES else None
    run.track(model=model, optimizer=optimizer, sdc="off", sdc_audits=audits)
    for step in run.steps(until=STEPS if first == 1 else FAULTY_STEP + 2):
        active.step = step
        if first == 1 and step == repeated_from:
            _kept.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        data, target = batch_of(rank, step)
        is_odd = fault in UNUSUAL_TARGETS and (rank == FAULTY_RANK or fault == "batches of NaN")
        if is_odd and step == FAULTY_STEP:
            target = target * UNUSUAL_TARGETS[fault]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        if fault in REFUSED_LOSSES and active.is_on and step >= FAULTY_STEP:
            loss = loss * math.nan
        scaler.scale(loss).backward()
        if active and fault == "result":
            parameters[0].grad.view(torch.int32).view(-1)[0] ^= 1  # type: ignore[union-attr]
        if guard is None or guard.allows(loss):
            scaler.step(optimizer)
            scaler.update()
    run.close()
    return [parameter.detach().clone() for parameter in parameters] if layout == "ddp" else []


def _halve_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad *= 0.5


def _spoil_backward(active: FaultyAt, value: float, _: nn.Module, __: Any, output: torch.Tensor) -> None:
    if active:
        output.register_hook(partial(_spoil, value))


def _spoil(value: float, gradient: torch.Tensor) -> torch.Tensor:
    spoiled = gradient.clone()
    spoiled.view(-1)[3] = value
    return spoiled
