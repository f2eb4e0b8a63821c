"""Optimizer state that a fresh process does not have yet: room for it, where the optimizer would have made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from everstep.manifests import Lies, Tensor
from trainer_hooks.nested_state import is_of_all, replicated
from trainer_hooks.snapshot.blob import dtype_of


def is_complete(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has state for every parameter that it trains, as it has after a step or a restore."""
    trained = (p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
    return bool(optimizer.state) and all(optimizer.state.get(p) for p in trained)  # to look makes an empty one


def lies_of(parameter: torch.Tensor, moment: torch.Tensor) -> Lies:
    """Where an optimizer has a tensor of its state for a parameter. A plain one on the CPU tells nothing."""
    if isinstance(moment, DTensor):
        return Lies.SPREAD
    if parameter.device.type == "cpu" and not isinstance(parameter, DTensor):
        return Lies.UNTOLD
    if isinstance(parameter, DTensor) and moment.ndim and moment.shape == parameter.shape:
        return Lies.WHOLE
    return Lies.HOST if moment.device.type == "cpu" else Lies.DEVICE


def room_for(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, key: str, stored: Tensor
) -> torch.Tensor:
    """Room for what was ``stored`` under ``key`` of the state of a parameter in this group of its optimizer."""
    if is_of_all(optimizer):
        return replicated(torch.empty(stored.shape, dtype=dtype_of(stored.dtype)), parameter)
    return moment_like(parameter, key, stored, bool(group.get("capturable") or group.get("fused")))


def moment_like(parameter: torch.Tensor, key: str, stored: Tensor, capturable: bool) -> torch.Tensor:
    """Room for what was ``stored`` under ``key`` of a parameter's state.

    What has the parameter's shape is made like it, unless it was plain beside a DTensor. A scalar lies where it lay;
    where that was not told, a step counter and all scalars of a larger parameter are on the host unless the optimizer
    is fused or ``capturable``.
    """
    dtype, shape, lies = dtype_of(stored.dtype), stored.shape, stored.lies
    counts = lies is Lies.HOST or (key == "step" and lies is not Lies.SPREAD)
    plain = lies is Lies.WHOLE and isinstance(parameter, DTensor)
    if shape == tuple(parameter.shape) and (shape or not counts) and not plain:
        return _empty_like(parameter.detach(), dtype)
    if lies is Lies.UNTOLD:
        lies = Lies.DEVICE if capturable or shape else Lies.HOST
    made = torch.empty(shape, dtype=dtype, device="cpu" if lies is Lies.HOST and not shape else parameter.device)
    if lies is Lies.SPREAD and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_like; of a DTensor past its dispatcher, whose first call in a process takes tens of milliseconds."""
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype)
    return DTensor.from_local(
        torch.empty_like(parameter._local_tensor, dtype=dtype),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
