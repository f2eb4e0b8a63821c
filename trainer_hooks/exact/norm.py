"""The norm of gradients, added in an order that does not depend on how they are sharded.

A row of a parameter (along the dimension that is sharded; of whole ones the first) lies on one rank, so ranks add the
squares of their rows, and each adds those of all rows. Halves are added element by element: kernels of sums take
another order on other shapes and numbers of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer_hooks.exact.sums import all_gather
from trainer_hooks.waits import Waits

_EPSILON = 1e-6
"""Added to the norm, as by torch.nn.utils.clip_grad_norm_."""


@torch.no_grad()
def clip_in_fixed_order(parameters: Iterable[torch.Tensor], max_norm: float, waits: Waits) -> torch.Tensor:
    """Scales gradients to a 2-norm of at most ``max_norm``, as torch.nn.utils.clip_grad_norm_ does.

    Returns the norm before, a scalar of float32, or float64 where a gradient is. A collective where gradients are
    sharded. Raises TypeError for a layout other than that of fully_shard.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    squares = _of_all_rows([_rows(gradient) for gradient in gradients], gradients, waits)
    norm = _pairwise(torch.stack([_pairwise(rows[None])[0] for rows in squares])[None])[0].sqrt()
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return norm


def _of_all_rows(
    squares: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], waits: Waits
) -> Sequence[torch.Tensor]:
    """Of each gradient the sums of squares of all its rows, from those of the rows that are here."""
    every = list(squares)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if isinstance(gradient, DTensor) and gradient.device_mesh.size(-1) > 1:
            mesh = gradient.device_mesh
            by_group.setdefault(mesh.get_group(mesh.ndim - 1), []).append(place)
    for group, places in by_group.items():
        ways = dist.get_world_size(group)
        counts = [gradients[place].shape[_dim(gradients[place])] for place in places]
        widths = [-(-count // ways) for count in counts]
        dtype = torch.float64 if any(squares[p].dtype == torch.float64 for p in places) else torch.float32
        own = squares[places[0]].new_zeros(sum(widths), dtype=dtype)
        for place, piece in zip(places, torch.split(own, widths), strict=True):
            piece[: squares[place].numel()] = squares[place]
        whole = own.new_empty(ways * own.numel())
        with waits.on(own.device):
            all_gather(whole, own, group=group)
        for place, count, rows in zip(places, counts, torch.split(whole.view(ways, -1), widths, dim=1), strict=True):
            every[place] = rows.reshape(-1)[:count].to(squares[place].dtype)
    wide = torch.float64 if any(rows.dtype == torch.float64 for rows in every) else torch.float32
    return [rows.to(wide) for rows in every]


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    """Of each row that is here the sum of squares, ``[rows]`` in float32 or float64."""
    local = _local(gradient)
    if local.ndim == 0:
        local = local[None]
    moved = local.movedim(_dim(gradient), 0)
    width = moved.shape[1:].numel()
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    return _pairwise(moved.reshape(moved.shape[0], width).to(wide).square())


def _pairwise(values: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` to ``[n]``: the right half is added to the left one until one column is left.

    Writes over ``values``.
    """
    while (width := values.shape[1]) > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:]
        values = values[:, :half]
    return values.sum(1) if values.shape[1] == 0 else values[:, 0]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _dim(gradient: torch.Tensor) -> int:
    """The one that is sharded."""
    if not isinstance(gradient, DTensor):
        return 0
    *replicated, shard = gradient.placements
    if not isinstance(shard, Shard) or not all(isinstance(placement, Replicate) for placement in replicated):
        raise TypeError(f"a gradient is laid out as {gradient.placements}: only what fully_shard shards has this norm")
    return shard.dim
