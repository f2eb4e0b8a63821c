"""Rate of parameter digests, against a copy within the same memory in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from bench.gpu_steps.sheet import Sheet
from bench.table import Row
from everstep_trainer.digests.digest import WeightedDigest, tensor_digest

TENSORS, TENSOR_BYTES, CPU_TENSOR_BYTES = 64, 64 << 20, 64 << 10
COMPARED_BYTES = 64 << 20
"""Of the parameters, whose digest the host makes too."""
REPEATS, SMALL_TENSORS = 10, 400
FLOOR_PERCENT, AIM_PERCENT = 50.0, 90.0
"""Of the bytes per second that a copy reads and writes. A digest reads each byte once and writes nothing: the limit is
100."""


def step(sheet: Sheet, device: str) -> None:
    where = torch.device(device)
    if device == "cuda":
        sheet.note(torch_device=torch.cuda.get_device_name(0))
    each = TENSOR_BYTES if device == "cuda" else CPU_TENSOR_BYTES
    tensors = [
        torch.randint(-(1 << 15), 1 << 15, (each // 2,), dtype=torch.int16, device=where) for _ in range(TENSORS)
    ]
    tensors = [tensor.view(torch.bfloat16) for tensor in tensors]
    require_equal(tensors)
    copy = copy_rate(tensors, where)
    sheet.add(Row("copy within device memory, read and written", copy / 1e9, "GB/s"))
    sheet.add(*rate_rows(tensors, where, copy))
    few = [torch.ones(512, dtype=torch.bfloat16, device=where) for _ in range(SMALL_TENSORS)]
    took = timed(WeightedDigest(few).enqueue, where)
    sheet.add(Row(f"digest of {SMALL_TENSORS} tensors of 1 KiB", took * 1e3, "ms"))


def require_equal(tensors: list[torch.Tensor]) -> None:
    """Raises AssertionError where the host makes another digest of the same bytes."""
    some = tensors[: max(1, COMPARED_BYTES // tensors[0].nbytes)]
    here, there = WeightedDigest(some).value(), WeightedDigest([tensor.cpu() for tensor in some]).value()
    assert here == there, f"{here:016x} on the device, {there:016x} on the host"


def rate_rows(tensors: list[torch.Tensor], where: torch.device, copy: float) -> list[Row]:
    """The digest as it is, which is judged; by tensor; and of ranges at odd places, whose words are not aligned."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    against = f"a copy, {copy / 1e9:.0f} GB/s read and written"
    marks = (FLOOR_PERCENT, AIM_PERCENT) if where.type == "cuda" else (None, None)

    def percent(name: str, work: Callable[[], object], floor: float | None = None, aim: float | None = None) -> Row:
        share = 100.0 * nbytes / timed(work, where) / copy
        return Row(f"{name}, against a copy", share, "%", floor, aim, against, smaller_is_better=False)

    name = f"digest of {nbytes >> 20} MiB"
    return [
        Row(name, nbytes / timed(WeightedDigest(tensors).enqueue, where) / 1e9, "GB/s"),
        percent(name, WeightedDigest(tensors).enqueue, *marks),
        percent(f"{name}, by tensor", lambda: [tensor_digest(tensor) for tensor in tensors]),
        percent(f"{name}, at odd places", lambda: [tensor_digest(tensor, offset=1) for tensor in tensors]),
    ]


def copy_rate(tensors: list[torch.Tensor], where: torch.device) -> float:
    """Bytes per second read and written by a copy of all tensors to others."""
    others = [torch.empty_like(tensor) for tensor in tensors]
    seconds = timed(lambda: torch._foreach_copy_(others, tensors), where)
    return 2 * sum(tensor.nbytes for tensor in tensors) / seconds


def timed(work: Callable[[], object], where: torch.device) -> float:
    """Median seconds of ``work``; on a GPU between two events around it."""
    work()
    took: list[float] = []
    for _ in range(REPEATS):
        if where.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            took.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
    return median(took)
