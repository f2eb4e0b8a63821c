"""Which GPUs a rank's state lies on, and which one a thread acts on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer_hooks.state import TrackedTensor


def gpus_of(tensors: Iterable[TrackedTensor]) -> tuple[torch.device, ...]:
    """The GPUs that tracked tensors lie on, lowest first: mostly one. None of them where all are on the host."""
    found = {tensor.local.device for tensor in tensors if tensor.local.is_cuda}
    return tuple(sorted(found, key=lambda device: device.index or 0))


def current_gpu() -> torch.device | None:
    """The GPU that the calling thread acts on; None in a process that has not used CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())
