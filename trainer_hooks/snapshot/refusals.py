"""What looks as if it could be stored, and would come back without some of it: refused by name, with what to do."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def require_bytes_of_its_own(name: str, tensor: torch.Tensor, mend: str) -> None:
    """Raises TypeError, ending with ``mend``, where the bytes at a tensor's address are not all of it.

    A tensor that wraps others (8-bit optimizer state, float8 weights) has no memory, and all of them the same address.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = f"has the layout {tensor.layout if tensor.layout is not torch.strided else 'of a nested tensor'}"
    elif tensor.is_quantized:
        what = "is quantized, with a scale that is not among its elements"
    elif type(tensor) not in _PLAIN and bool(is_traceable_wrapper_subclass(tensor)):
        what = f"is a {type(tensor).__qualname__}, which wraps other tensors"
    elif tensor.is_meta:
        what = "lies on the meta device, where it has no memory yet"
    elif tensor.numel() and not tensor.data_ptr():
        what = "has elements and no memory"
    else:
        return
    raise TypeError(f"{name} {what}: {mend}")


def refuse_fsdp1(top: str, parameter: torch.Tensor) -> None:
    """Raises TypeError for a parameter of FSDP1."""
    if type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_is_flat_param"):
        raise TypeError(f"{top} is sharded by FSDP1, whose parameters have no boxes: use fully_shard (FSDP2)")


def refuse_zero(top: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for an optimizer that keeps its state in another one."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TypeError(
            f"{top} is a ZeroRedundancyOptimizer, whose state is in an optimizer inside it and would not be stored: "
            "use fully_shard (FSDP2), which shards optimizer state too"
        )
