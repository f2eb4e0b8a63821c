"""Store optimizer state that is not one tensor per parameter: nested lists and dictionaries, and the state of LBFGS.

Such state is Python state, restored from bytes on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from everstep.errors import NotRestorable
from everstep.layout.manifests import TensorInfo, TensorPlacement
from everstep_trainer.state.python_value_codec import dtype_of

SHARED_KEY = ""  # replaces a parameter's name for optimizer state that belongs to no parameter


def has_joint_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one state is kept for all parameters, under the first: LBFGS concatenates their gradients."""
    return isinstance(optimizer, torch.optim.LBFGS)


def to_store(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    """Return a parameter's state without the mesh it is replicated over, for a layout with another mesh or none."""
    return map_tensors(value, _without_mesh) if has_joint_state(optimizer) else value


def to_live(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, value: Any) -> Any:
    """Return a stored parameter's state on the parameter's device, as torch's own ``load_state_dict`` places it."""
    if has_joint_state(optimizer):
        return map_tensors(value, lambda tensor: replicated(tensor, parameter))
    return map_tensors(value, lambda tensor: tensor.to(parameter.device))


def replicated(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor replicated over the mesh of the parameter."""
    here = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return here
    mesh = parameter.device_mesh
    return DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)


def shared_state(optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield optimizer state that belongs to no parameter. Raises ValueError if optimizers of one key would mix it."""
    for top, optimizer in optimizers:
        if shared := {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}:
            if [key for key, _ in optimizers].count(top) > 1:
                raise ValueError(
                    f"one of several optimizers under {top} has state that belongs to no parameter, under "
                    f"{next(iter(shared))!r}: track each optimizer under its own name"
                )
            yield top, shared


def load_shared(optimizer: torch.optim.Optimizer, stored: Mapping[Any, Any]) -> None:
    """Load the result of ``shared_state``, with tensors on the device of the first parameter."""
    if stored:
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.state.update(map_tensors(dict(stored), lambda tensor: tensor.to(device)))


def require_same_parameters(top: str, stored: Sequence[Sequence[str]], live: Sequence[str]) -> None:
    """Raise NotRestorable unless ``live``, an LBFGS's parameters, equals a stored group, including the order."""
    if list(live) not in [list(members) for members in stored]:
        raise NotRestorable(
            f"{top} is an LBFGS, whose state concatenates all of its parameters, and these are not the stored ones in "
            f"the same order ({len(live)} now, from {live[0]} on): restore it with the same parameters; pipeline "
            "stages, for example, divide them"
        )


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested state with its tensors changed; types that torch's own readers do not make stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(inside, change) for key, inside in value.items()}
    return type(value)(map_tensors(inside, change) for inside in value) if type(value) in (list, tuple) else value


def _without_mesh(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and all(isinstance(placement, Replicate) for placement in tensor.placements):
        return tensor.to_local()
    return tensor


def has_full_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has state for every parameter it trains, as after a step or a restore."""
    trained = (p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
    # indexing would create an empty entry
    return bool(optimizer.state) and all(optimizer.state.get(p) for p in trained)


def location_of(parameter: torch.Tensor, moment: torch.Tensor) -> TensorPlacement:
    """Return where an optimizer holds a tensor of its state. A plain one on the CPU tells nothing."""
    if isinstance(moment, DTensor):
        return TensorPlacement.DTENSOR
    if parameter.device.type == "cpu" and not isinstance(parameter, DTensor):
        return TensorPlacement.UNKNOWN
    if isinstance(parameter, DTensor) and moment.ndim and moment.shape == parameter.shape:
        return TensorPlacement.FULL
    return TensorPlacement.HOST if moment.device.type == "cpu" else TensorPlacement.DEVICE


def allocate_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, key: str, stored: TensorInfo
) -> torch.Tensor:
    """Allocate the tensor ``stored`` under ``key`` in the state of a parameter of this group."""
    if has_joint_state(optimizer):
        return replicated(torch.empty(stored.shape, dtype=dtype_of(stored.dtype)), parameter)
    return allocate_moment(parameter, key, stored, bool(group.get("capturable") or group.get("fused")))


def allocate_moment(parameter: torch.Tensor, key: str, stored: TensorInfo, capturable: bool) -> torch.Tensor:
    """Allocate the tensor ``stored`` under ``key`` in a parameter's state: like the parameter if it has its shape. A
    scalar goes where it was or, if unknown, to the host, unless the optimizer is fused or ``capturable``."""
    dtype, shape, lies = dtype_of(stored.dtype), stored.shape, stored.placement
    counts = lies is TensorPlacement.HOST or (key == "step" and lies is not TensorPlacement.DTENSOR)
    plain = lies is TensorPlacement.FULL and isinstance(parameter, DTensor)
    if shape == tuple(parameter.shape) and (shape or not counts) and not plain:
        return _empty_like(parameter.detach(), dtype)
    if lies is TensorPlacement.UNKNOWN:
        lies = TensorPlacement.DEVICE if capturable or shape else TensorPlacement.HOST
    on_host = lies is TensorPlacement.HOST and not shape
    made = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
    return replicated(made, parameter) if lies is TensorPlacement.DTENSOR else made


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like torch.empty_like, but without a DTensor's dispatcher, whose first call takes tens of milliseconds."""
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
