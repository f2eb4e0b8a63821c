"""Refuse tensors and optimizers that cannot be stored or would be restored incompletely, each with a way out."""

from __future__ import annotations

import re

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ODD_BITS = re.compile(r"torch\.(u?int[1-7]|bits\w+)")  # dtypes that torch cannot copy


def unsupported_reason(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be stored, as the end of a sentence; empty if it can."""
    if is_lazy(tensor):
        return "is not initialized: give the model a first batch before"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"has the layout {tensor.layout if tensor.layout is not torch.strided else 'of a nested tensor'}"
    if tensor.is_quantized:
        return "is quantized, with a scale that is not among its elements"
    if type(tensor) not in _PLAIN and bool(is_traceable_wrapper_subclass(tensor)):
        return f"is a {type(tensor).__qualname__}, which wraps other tensors"
    if tensor.is_meta:
        return "lies on the meta device, where it has no memory yet"
    if _ODD_BITS.fullmatch(str(tensor.dtype)):
        return f"is of {tensor.dtype}, which torch does not copy"
    if tensor.numel() and not tensor.data_ptr():
        return "has elements and no memory"
    return ""


def require_own_memory(name: str, tensor: torch.Tensor, fix_hint: str) -> None:
    """Raise TypeError, ending with ``fix_hint``, if the memory at a tensor's address is not all of the tensor."""
    if reason := unsupported_reason(tensor):
        raise TypeError(f"{name} {reason}: {fix_hint}")


def require_dense(name: str, local: torch.Tensor) -> None:
    """Raise TypeError if a tensor of a module or an optimizer cannot be stored, or cannot be filled."""
    require_own_memory(
        name, local, "only plain dense tensors are stored; leave it out by run.track(exclude=...), or hold it in such"
    )
    if local.numel() and any(n > 1 and not stride for n, stride in zip(local.size(), local.stride(), strict=True)):
        raise TypeError(
            f"{name} is expanded: several of its elements share memory, which cannot be restored. "
            "Copy it with clone(), or leave it out by run.track(exclude=...)"
        )


def refuse_own_shard(name: str, parameter: torch.Tensor, moment: torch.Tensor) -> None:
    """Raise TypeError for plain optimizer state of a shard's shape: plain tensors are to be equal on all ranks."""
    if not isinstance(parameter, DTensor) or isinstance(moment, DTensor) or not moment.ndim:
        return
    shard = parameter._local_tensor.shape
    if moment.shape == shard != parameter.shape:
        raise TypeError(
            f"{name} is a plain tensor with the shape {list(shard)} of this rank's shard, but its parameter has the "
            f"shape {list(parameter.shape)}: it would be stored as if it were equal on all ranks. Make it as a "
            "DTensor, by torch.zeros_like(parameter), or leave it out by run.track(exclude=...)"
        )


def refuse_fsdp1(top: str, parameter: torch.Tensor) -> None:
    """Raise TypeError for a parameter of FSDP1."""
    if type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_is_flat_param"):
        raise TypeError(f"{top} is sharded by FSDP1, whose parameters have no boxes: use fully_shard (FSDP2)")


def refuse_zero(top: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer that keeps its state in another one."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            f"{top} is a ZeroRedundancyOptimizer, whose state is in an optimizer inside it and would not be stored: "
            "use fully_shard (FSDP2), which shards optimizer state too"
        )


def refuse_long_history(top: str, optimizer: torch.optim.LBFGS, limit: int) -> None:
    """Raise ValueError for an LBFGS whose history of steps and gradients (Python state) will exceed ``limit`` bytes."""
    (group,) = optimizer.param_groups
    history, one = group["history_size"], 2 * sum(p.numel() * p.element_size() for p in group["params"])
    if history * one > limit:
        shorter = f"take history_size={limit // one} or less, or " if limit >= one else ""
        raise ValueError(
            f"{top} is an LBFGS with history_size={history}, which will keep {history * one} bytes in lists. Lists are "
            f"stored as Python state, up to {limit} bytes: {shorter}leave its state out by "
            f"run.track(exclude=['{top}.*']), so that it begins with an empty history after a loss"
        )
