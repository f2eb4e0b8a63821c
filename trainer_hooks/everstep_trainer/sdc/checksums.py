"""Check a whole matrix product by sums of its rows, and a few of its elements exactly.

A product is ``result [m, n] = left [m, k] @ right [k, n]``. The rows of a block are added with random signs, R. Then
``R @ result`` must equal ``(R @ left) @ right`` up to rounding, which costs one row's product for a block. A wrong
element shows in the sums of its block and column. The sums only tell where to look: elements are judged in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch

BLOCK_ROWS = 256
"""Rows that are added to one. Rounding errors in a sum grow with the root of it, costs fall with it."""
USUAL_FACTOR = 14.0
"""Largest residual that is not suspicious, in usual ones: some nine standard deviations."""
LEAST_EPS, MOST_EPS = 0.5, 8.0
"""Bounds of that, in relative rounding errors of the result: zeros have no residual, and faults may be everywhere."""
ACCUMULATED = 32.0
"""Added to the upper bound, in rounding errors of a sum of k terms."""
JUDGED_ROWS = 4
"""Rows of a block whose elements in the suspicious column are judged."""
ERROR_SIGMAS = 16.0
"""Tolerance in standard deviations of the rounding error of an inner product of K terms, which is about
eps * sqrt(K) * (root of the sum of squared terms); kernels may add in blocks, with smaller errors."""
SEQUENTIAL_SIGMAS = 8.0
"""Added to the tolerance of an element that looks wrong: standard deviations of the error of a kernel that adds the
terms one after another. If they have one sign, it is larger than that of terms whose signs differ."""
SEQUENTIAL_FACTOR = 4.0
"""Added likewise: how often the error of such a sum itself. Equal terms are all rounded in the same direction."""


class Product(msgspec.Struct, frozen=True):
    """A matrix product as training did it. ``bias`` is added to each row."""

    result: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    bias: torch.Tensor | None = None


class Patch(msgspec.Struct, frozen=True):
    """Some elements of one column of a product, ``rows [r, 1]``, and the ``left [r, k] @ right [k, 1]`` they equal."""

    rows: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


class Screening(msgspec.Struct, frozen=True):
    """What the sums of a product say, as tensors on its device.

    ``place``: the block and column, as one number, with the worst residual; ``allowed``: the residual of each column
    that is not suspicious.
    """

    is_suspicious: torch.Tensor
    place: torch.Tensor
    allowed: torch.Tensor


# ---- screens


def residuals(product: Product) -> torch.Tensor:
    """Return the difference of both sums for each block of rows and each column."""
    dtype = _summed_as(product.result)
    result = _sums(product.result, dtype)
    left = _sums(product.left, dtype)
    again = left @ product.right.to(dtype)
    if product.bias is not None:
        again.addr_(_signs(len(product.result), dtype, result.device)[1], product.bias.to(dtype))
    return result.sub_(again)


def screen(product: Product, residual: torch.Tensor) -> Screening:
    """Tell whether a product's residuals are larger than rounding explains. Nothing waits for the GPU.

    A residual is measured by the norm of its column's part in the block, and compared with those of other columns.
    """
    norms = _norms(product.result)
    scale = norms.add_(norms.mean()).clamp_min_(torch.finfo(norms.dtype).tiny)
    relative = residual.abs().to(norms.dtype).div_(scale)
    largest, place = relative.flatten().max(0)
    eps, accumulated = torch.finfo(product.result.dtype).eps, _accumulated_eps(product.result)
    most = MOST_EPS * eps + ACCUMULATED * accumulated * math.sqrt(product.left.shape[1])
    allowed = relative.sqrt_().mean().square_().mul_(USUAL_FACTOR).clamp_(LEAST_EPS * eps, most)
    return Screening(~(largest <= allowed), place, scale.amax(0).mul_(allowed))


def worst_patch(product: Product, place: torch.Tensor) -> Patch:
    """Return the elements of a block's column that differ most from the product. Nothing waits for the GPU."""
    count, columns = product.result.shape
    rows = torch.arange(BLOCK_ROWS, device=place.device).add_(place // columns * BLOCK_ROWS).clamp_(max=count - 1)
    column = (place % columns)[None]
    # Only the column is cast, as autocast casts the whole.
    dtype = product.result.dtype
    right = product.right.index_select(1, column).to(dtype)
    left = product.left.index_select(0, rows).to(dtype)
    if product.bias is not None:  # as one more column of ones
        left = torch.cat([left, left.new_ones(len(left), 1)], dim=1)
        right = torch.cat([right, product.bias.index_select(0, column)[None].to(dtype)])
    elements = product.result.index_select(0, rows).index_select(1, column)
    exact = _summed_as(product.result)
    worst = (elements.to(exact) - left.to(exact) @ right.to(exact)).abs_().flatten()
    most = worst.topk(min(JUDGED_ROWS, count)).indices
    return Patch(elements[most], left[most], right)


def _sums(matrix: torch.Tensor, dtype: torch.dtype, *, signed: bool = True) -> torch.Tensor:
    """Return the sums of each block of rows, with random signs or without, added up in ``dtype``."""
    rows, whole = len(matrix), len(matrix) // BLOCK_ROWS
    if matrix.is_cuda and matrix.dtype != dtype and signed:
        return _wide_sums(matrix, dtype)
    matrix = matrix.to(dtype)
    signs = _signs(rows, dtype, matrix.device)[0] if signed else matrix.new_ones(rows)
    if rows <= BLOCK_ROWS:
        return signs[None] @ matrix
    blocks = matrix[: whole * BLOCK_ROWS].unflatten(0, (whole, BLOCK_ROWS))  # type: ignore[no-untyped-call]
    sums = torch.bmm(signs[: whole * BLOCK_ROWS].view(whole, 1, BLOCK_ROWS), blocks)[:, 0]
    if whole * BLOCK_ROWS == rows:
        return sums
    return torch.cat([sums, signs[None, whole * BLOCK_ROWS :] @ matrix[whole * BLOCK_ROWS :]])


def _wide_sums(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of each block of rows with random signs, in a wider dtype but without a wider copy."""
    signed = matrix * _signs(len(matrix), matrix.dtype, matrix.device)[0][:, None]  # exact in any dtype
    return _by_blocks(signed, lambda blocks, dim: blocks.sum(dim, dtype=dtype))


def _by_blocks(matrix: torch.Tensor, reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return what ``reduce`` makes of each block of rows, with one launch for all whole blocks."""
    whole = len(matrix) // BLOCK_ROWS
    parts = []
    if whole:
        blocks = matrix[: whole * BLOCK_ROWS].unflatten(0, (whole, BLOCK_ROWS))  # type: ignore[no-untyped-call]
        parts.append(reduce(blocks, 1))
    if whole * BLOCK_ROWS < len(matrix):
        parts.append(reduce(matrix[None, whole * BLOCK_ROWS :], 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the norm of each column in each block of rows, in float32 or float64."""
    dtype = torch.float64 if matrix.dtype is torch.float64 else torch.float32
    if not matrix.is_cuda:  # squares and their sums take half the time of norms here
        return _sums(matrix.to(dtype).square(), dtype, signed=False).sqrt_()
    return _by_blocks(matrix, lambda blocks, dim: torch.linalg.vector_norm(blocks, dim=dim, dtype=dtype))


@lru_cache(maxsize=256)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random signs, and their sum in each block of rows; the same on each call."""
    draw = torch.Generator().manual_seed(rows)
    signs = torch.randint(2, (rows,), generator=draw).mul_(2).sub_(1)
    blocks = torch.stack([part.sum() for part in torch.split(signs, BLOCK_ROWS)])
    return signs.to(device, dtype), blocks.to(device, dtype)


def _summed_as(result: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums: in half precision they would round so much that every clean product looks wrong."""
    return torch.float64 if result.dtype is torch.float64 else torch.float32


# ---- exact judgements


def product_of(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the product, computed in float64 and rounded to ``dtype``."""
    return (left.double() @ right.double()).to(dtype)


def compare_elements(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> str | None:
    """Return how ``rows`` differ from ``left @ right`` beyond rounding; None if they agree or nothing can be said."""
    exact = left.double() @ right.double()
    if not bool(torch.isfinite(exact).all()):
        return None
    tolerance = _tolerance(rows, left, right, exact)
    wrong = ~((rows.double() - exact).abs() <= tolerance)
    if not bool(wrong.any()):
        return None
    again = left @ right
    if bool(((again.double() - exact).abs() > tolerance).any()):
        return None  # these operands need a larger tolerance
    wrong &= (rows.double() - exact).abs() > tolerance + _sequential_error(rows, left, right, exact)
    if not bool(wrong.any()):
        return None
    row, column = wrong.nonzero()[0].tolist()
    got, expected = float(rows[row, column]), float(exact[row, column])
    return f"{int(wrong.sum())} of {rows.numel()} elements differ, the first: got {got:.9g}, expected {expected:.9g}"


def _tolerance(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each element that rounding explains."""
    terms = (left.double().square() @ right.double().square()).sqrt()
    summed = ERROR_SIGMAS * _accumulated_eps(rows) * max(1.0, math.sqrt(left.shape[1]) / 4) * terms
    tolerance: torch.Tensor = summed + torch.finfo(rows.dtype).eps * exact.abs()
    return tolerance


def _sequential_error(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return how far a kernel may err that adds an element's terms one after another, as those for AVX-512 do."""
    terms = left.double()[:, :, None] * right.double()
    partial_sums = terms.cumsum(1)
    deviation = _accumulated_eps(rows) * (partial_sums.square().sum(1) / 12).sqrt()
    # torch adds up in float64 on a CPU
    added = np.cumsum(terms.to(_summed_as(rows)).cpu().numpy(), axis=1)[:, -1]
    measured = (torch.from_numpy(added).to(exact) - exact).abs()
    return SEQUENTIAL_SIGMAS * deviation + SEQUENTIAL_FACTOR * measured


def multiplies_in_tf32() -> bool:
    """Return whether CUDA products of float32 are computed in TF32, under torch's older and newer switch alike.

    The older switch, ``allow_tf32``, raises once a program has used the newer one.
    """
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def _accumulated_eps(result: torch.Tensor) -> float:
    """Return the relative rounding error with which a product of this dtype is added up."""
    if result.is_cuda and result.dtype is torch.float32 and multiplies_in_tf32():
        return 2.0**-10  # TF32 has 10 bits of mantissa
    return torch.finfo(torch.float64 if result.dtype is torch.float64 else torch.float32).eps
