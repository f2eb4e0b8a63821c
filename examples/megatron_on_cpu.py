"""Megatron-core on machines without a GPU, to try and test it.

Its DistributedDataParallel, optimizers and schedules name the device ``cuda`` in about twenty places. Without a GPU
these places get host memory; with one, nothing is changed. Read in Megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of torch that makes tensors on the host where the device ``cuda`` is asked for."""

    @wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def _type_on_gpu(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Return the type's name as of a tensor on a GPU: Megatron's optimizers tell precisions apart by it."""
    found = _type(tensor, *args, **options)
    return found.replace("torch.", "torch.cuda.", 1) if not args and not options else found


_type = torch.Tensor.type

if not torch.cuda.is_available():
    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.type = _type_on_gpu  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
