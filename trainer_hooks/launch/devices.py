"""How many ranks a node offers when asked for ``gpu`` or ``auto``.

Counting may initialize CUDA, so it happens in a child of the fork server that does nothing else.
"""

from __future__ import annotations

import os


def report_count(descriptors: tuple[int, ...], *, kind: str) -> None:
    """Writes the number of ranks for ``gpu``, ``cpu`` or ``auto`` as decimal text to the descriptor (gpu may be 0)."""
    (answer,) = descriptors
    os.write(answer, str(count(kind)).encode())


def count(kind: str) -> int:
    """CUDA devices for ``gpu``, cores for ``cpu``, whichever there is for ``auto`` (as torchrun counts)."""
    import torch

    devices = torch.cuda.device_count() if kind in ("gpu", "auto") else 0
    if kind == "gpu" or devices:
        return devices
    return os.cpu_count() or 1
