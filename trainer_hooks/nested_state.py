"""Optimizer state that is not one tensor of its parameter's: what is nested in lists and dictionaries, and LBFGS's.

It is Python state, which comes back from its bytes on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from everstep.errors import NotRestorable

SHARED = ""
"""In the place of a parameter's name: state of an optimizer that is of none."""


def is_of_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is of all its parameters at once, under the first of them: LBFGS makes vectors of their
    gradients, flat and one behind another, which torch replicates where the parameters are sharded (FSDP2)."""
    return isinstance(optimizer, torch.optim.LBFGS)


def to_store(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    """A parameter's state without the mesh that it is replicated over, for a layout that has another or none."""
    return each_tensor(value, _without_mesh) if is_of_all(optimizer) else value


def to_live(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, value: Any) -> Any:
    """What was stored of a parameter's state, where its optimizer takes it from: on the device of the parameter, as
    torch's own ``load_state_dict`` has it."""
    if is_of_all(optimizer):
        return each_tensor(value, lambda tensor: replicated(tensor, parameter))
    return each_tensor(value, lambda tensor: tensor.to(parameter.device))


def replicated(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In full wherever the parameter, or a part of it, is."""
    here = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return here
    mesh = parameter.device_mesh
    return DTensor.from_local(here, mesh, [Replicate()] * mesh.ndim, run_check=False)


def shared_state(optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """What optimizers have of no parameter, by the keys under which they are tracked: torch keeps in ``state`` what is
    under other keys than tensors, too.

    Raises ValueError where several are tracked under one key, and the one's would be the other's.
    """
    for top, optimizer in optimizers:
        if shared := {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}:
            if [key for key, _ in optimizers].count(top) > 1:
                raise ValueError(
                    f"one of several optimizers under {top} has state of no parameter, under {next(iter(shared))!r}: "
                    "track each under a name of its own"
                )
            yield top, shared


def put_shared(optimizer: torch.optim.Optimizer, stored: Mapping[Any, Any]) -> None:
    """What ``shared_state`` gave; its tensors on the device of the first parameter."""
    if stored:
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.state.update(each_tensor(dict(stored), lambda tensor: tensor.to(device)))


def require_same_vector(top: str, stored: Sequence[Sequence[str]], now: Sequence[str]) -> None:
    """Raises NotRestorable where ``now``, the parameters of an optimizer whose state is of all of them, are none of the
    ``stored`` groups in the order that they have there."""
    if list(now) not in [list(members) for members in stored]:
        raise NotRestorable(
            f"{top} is an LBFGS, which keeps vectors over all of its parameters one behind another, and these are not "
            f"those that it had when the version was stored, in the same order ({len(now)} now, from {now[0]} on): "
            "restore with the parameters that it had, which stages of a pipeline, say, divide"
        )


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested state with its tensors changed; a value of another type than torch's own readers make is left as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: each_tensor(inside, change) for key, inside in value.items()}
    return type(value)(each_tensor(inside, change) for inside in value) if type(value) in (list, tuple) else value


def _without_mesh(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and all(isinstance(placement, Replicate) for placement in tensor.placements):
        return tensor.to_local()
    return tensor
