"""The training that recoveries are measured on, the same for Everstep and for every peer.

Eight ``Linear(512, 512)`` layers under AdamW (2.1 M parameters), four ranks: small enough that a step takes 35-50 ms
on two cores, so that what is measured is recovery and not arithmetic. Imports torch and nothing of Everstep, because
peers run it in an environment of their own.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH, BATCH = int(os.environ.get("BENCH_LAYERS", "8")), int(os.environ.get("BENCH_WIDTH", "512")), 32
"""The model's size; other benches than those of recovery by size leave it as it is."""

CPU_STEPS = frozenset(int(step) for step in os.environ.get("BENCH_CPU_STEPS", "").split(",") if step)
"""The steps after which each rank logs its CPU time."""


def build_model(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    """The model, equal on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def batch(step: int, rank: int) -> torch.Tensor:
    """``[BATCH, WIDTH]`` of input, a function of step and rank alone."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


class StepLog:
    """One JSON line per finished step, in a file per process, with the machine-wide monotonic clock."""

    def __init__(self, folder: str, name: str) -> None:
        path = Path(folder, f"{name}-{os.getpid()}.jsonl")
        self._file = path.open("a", buffering=1)
        self._path = path

    def write(self, event: str, step: int, **more: object) -> None:
        row = {"event": event, "step": step, "at": time.clock_gettime(time.CLOCK_MONOTONIC), **more}
        self._file.write(json.dumps(row) + "\n")

    def write_cpu(self, step: int) -> None:
        """Log this process's CPU seconds by thread, if ``BENCH_CPU_STEPS`` names the step, and leave a file as a sign.

        Threads that Python did not start count as torch's.
        """
        if step not in CPU_STEPS:
            return
        names = {thread.native_id: thread.name for thread in threading.enumerate()} | {os.getpid(): "training"}
        spent: dict[str, float] = defaultdict(float)
        for task in Path("/proc/self/task").iterdir():
            spent[names.get(int(task.name), "torch")] += int((task / "schedstat").read_text().split()[0]) / 1e9
        self.write("cpu", step, threads=spent)
        self._path.with_suffix(f".cpu-{step}").touch()


class Fault:
    """What befalls this rank, by ``BENCH_FAULT`` = ``rank:steps:where:signal``.

    ``steps`` is a comma-separated list, ``where`` is ``between`` (before the forward) or ``backward`` (in its middle).
    The victim signals itself, so that the moment is exact, and logs the time just before. Each strikes once, however
    often its step is computed: a file in ``BENCH_FOLDER`` marks it as done.
    """

    def __init__(self, rank: int, log: StepLog, model: nn.Module) -> None:
        victim, steps, where, signal_name = os.environ.get("BENCH_FAULT", "-1::between:KILL").split(":")
        self._armed = int(victim) == rank
        self._steps, self._where = {int(step) for step in steps.split(",") if step}, where
        self._signal = getattr(signal, f"SIG{signal_name}")
        self._log, self._folder = log, Path(os.environ.get("BENCH_FOLDER", "."))
        self._now = -1
        if self._armed and where == "backward":
            layers = list(model.children())
            layers[len(layers) // 2].register_forward_hook(self._watch_backward)

    def before_step(self, step: int) -> None:
        """Call at the boundary, before the forward of ``step``."""
        self._now = step
        if self._where == "between":
            self._strike(step)

    def _watch_backward(self, _layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        """On an activation, since a sharded model's parameters are not those that gradients arrive at."""
        output.register_hook(lambda _gradient: self._strike(self._now))

    def _strike(self, step: int) -> None:
        mark = self._folder / f"fault-{step}"
        if not self._armed or step not in self._steps or mark.exists():
            return
        mark.touch()
        self._log.write("fault", step)
        os.kill(os.getpid(), self._signal)
