"""The state that is saved and restored while that is measured, and what it must be at a step.

It is parameters alone, in rows of 1 KiB: ``tensors`` of ``tensor_bytes`` in all, in one of three layouts: a rank's own
(``alone``), equal on all ranks (``replicas``), or sharded over them by FSDP2 (``shards``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

COLUMNS = 256
"""Of fp32, so that a row is 1 KiB."""
ROW_BYTES = 4 * COLUMNS


@dataclass(frozen=True)
class Size:
    """A state: how many tensors of how many bytes each (whole KiB), in which layout."""

    tensors: int
    tensor_bytes: int
    layout: str = "alone"

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes


class _Parts(nn.Module):
    """Parameters that nobody computes with, without memory yet."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        for index in range(count):
            empty = torch.empty(shape, device="meta")
            self.register_parameter(f"part{index}", nn.Parameter(empty, requires_grad=False))


class Model:
    """The state, and what it must be at a step. ``device``: where it lies; on the host where that is not said."""

    def __init__(self, size: Size, device: torch.device | None = None) -> None:
        rows = size.tensor_bytes // ROW_BYTES
        shape = (rows, COLUMNS)
        module: nn.Module = _Parts(size.tensors, shape)
        offset = 0
        if size.layout == "shards":
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            module = fully_shard(module, mesh=mesh)
            offset = min(rows, dist.get_rank() * -(-rows // dist.get_world_size()))
        device = device or torch.device("cpu")
        self.module = module.to_empty(device=device)
        self.parts = [p.to_local() if size.layout == "shards" else p.data for p in self.module.parameters()]
        self._number = torch.arange(offset, rows, dtype=torch.float32, device=device)
        self._rows = rows

    def _expected(self, index: int, step: int) -> torch.Tensor:
        """Exact in fp32: below 2^24."""
        own = self._number[: self.parts[index].shape[0]]
        return (((own + index * self._rows) % 65536) + (step % 200) * 65536)[:, None]

    def update(self, step: int) -> None:
        """What an optimizer does: everything is written."""
        with torch.no_grad():
            for index, part in enumerate(self.parts):
                part.copy_(self._expected(index, step).expand_as(part))

    def spoil(self) -> None:
        for part in self.parts:
            part.fill_(-1)

    def require(self, step: int) -> None:
        """Raises AssertionError where a byte is not that step's."""
        for index, part in enumerate(self.parts):
            assert torch.equal(part, self._expected(index, step).expand_as(part)), f"tensor {index} is wrong"

    def arrays(self) -> list[np.ndarray]:
        return [part.numpy() for part in self.parts]
