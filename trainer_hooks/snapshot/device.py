"""Which GPU a rank's state lies on, and which one a thread acts on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer_hooks.state import TrackedTensor


def gpu_of(tensors: Iterable[TrackedTensor]) -> torch.device | None:
    """The GPU that tracked tensors lie on; of several the first, None where all are on the host."""
    found = {tensor.local.device for tensor in tensors if tensor.local.is_cuda}
    return min(found, key=lambda device: device.index or 0, default=None)


def current_gpu() -> torch.device | None:
    """The GPU that the calling thread acts on; None in a process that has not used CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())
