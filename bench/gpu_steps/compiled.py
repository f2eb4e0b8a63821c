"""Measurements of a model under torch.compile: compiled steps, snapshots beside them, and a restore."""

from __future__ import annotations

from bench.gpu_steps.gpt import Shape
from bench.gpu_steps.sheet import Sheet
from bench.gpu_steps.training import TINY, fitting, measure

SHAPE = Shape("0.1 B parameters", layers=8, width=1024, heads=16)


def step(sheet: Sheet, device: str) -> None:
    """On the CPU without generated code, which would need a compiler."""
    shape, backend = (fitting((SHAPE,)), "inductor") if device == "cuda" else (TINY, "aot_eager")
    measure(sheet, device, shape, backend, name="torch.compile")
