"""The state that is saved and restored in the measurements, with its expected value at a step.

It consists of parameters in rows of 1 KiB: ``tensors`` with ``tensor_bytes`` each, in one of three layouts: unique to a
rank (``alone``), equal on all ranks (``replicas``), or sharded over them by FSDP2 (``shards``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

COLUMNS = 256
"""Columns of fp32 values, so that a row has 1 KiB."""
ROW_BYTES = 4 * COLUMNS


@dataclass(frozen=True)
class Size:
    """A state: the number of its tensors, the bytes of each (whole KiB), and its layout."""

    tensors: int
    tensor_bytes: int
    layout: str = "alone"

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes


class _Parts(nn.Module):
    """Parameters without memory yet, which no forward pass uses."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        for index in range(count):
            empty = torch.empty(shape, device="meta")
            self.register_parameter(f"part{index}", nn.Parameter(empty, requires_grad=False))


class Model:
    """The state and its expected value at a step. ``device``: its device; the host by default."""

    def __init__(self, size: Size, device: torch.device | None = None) -> None:
        rows = size.tensor_bytes // ROW_BYTES
        shape = (rows, COLUMNS)
        module: nn.Module = _Parts(size.tensors, shape)
        offset = 0
        if size.layout == "shards":
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(module, mesh=mesh)
            offset = min(rows, dist.get_rank() * -(-rows // dist.get_world_size()))
        device = device or torch.device("cpu")
        self.module = module.to_empty(device=device)
        self.parts = [p.to_local() if isinstance(p, DTensor) else p.data for p in self.module.parameters()]
        self._number = torch.arange(offset, rows, dtype=torch.float32, device=device)
        self._rows = rows

    def _expected(self, index: int, step: int) -> torch.Tensor:
        """Return the expected values, below 2^24 and so exact in fp32."""
        own = self._number[: self.parts[index].shape[0]]
        return (((own + index * self._rows) % 65536) + (step % 200) * 65536)[:, None]

    def update(self, step: int) -> None:
        """Write all parameters, as an optimizer does."""
        with torch.no_grad():
            for index, part in enumerate(self.parts):
                part.copy_(self._expected(index, step).expand_as(part))

    def spoil(self) -> None:
        for part in self.parts:
            part.fill_(-1)

    def require(self, step: int) -> None:
        """Raise AssertionError if a value is not that of ``step``."""
        for index, part in enumerate(self.parts):
            assert torch.equal(part, self._expected(index, step).expand_as(part)), f"tensor {index} is wrong"

    def arrays(self) -> list[np.ndarray]:
        return [part.numpy() for part in self.parts]
