"""Rows that only a GPU can give: what a snapshot holds up there, and how fast its bytes come over PCIe.

A step is products of matrices that take several times as long as the copy, then an update that writes all of the state.
What a snapshot holds up is the time for which the training stream stands still, in a loop that reads its loss after
each step, and so has nothing enqueued when it begins a snapshot, and in one that runs ahead of the GPU.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import torch
from torch._C._distributed_c10d import PrefixStore

from bench.checkpoint_rows.rank import Heard, Rank, await_seal, warm
from bench.checkpoint_rows.single import MIB, NODE, marks
from bench.checkpoint_rows.state import Model, Size
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.processes import ProcessPool
from bench.table import Row
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.snapshot.pace import StepStopwatch
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

STEP_COPIES = 8
"""Factor by which a step is longer than the copy."""
SHORTEST_STEP_S = 0.05
PRODUCT = 4096
FEWEST_STEPS = 10
GPU = 0


@dataclass
class Figures:
    """Seconds: of one copy of the same bytes into pinned memory (``limit``); from ``begin`` until a snapshot is copied
    (``copied``); of a step without snapshots (``plain``) and with one each (``beside``), and for how long each of those
    was held up (``held_up``), also in a loop that runs ahead (``ahead``). ``last``: the last step stored."""

    name: str
    limit: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    held_up: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    last: int = 0


def rows(pool: ProcessPool, size: Size, repeats: int, judged: bool) -> list[Row]:
    """The state of one rank, on the first GPU; a word where there is none."""
    held_up, copy = "GPU: held up by a snapshot, against the step", "GPU: copy against the PCIe limit"
    if not torch.cuda.is_available():
        return [Row(name, None, "%", against="no GPU on this machine") for name in (held_up, copy)]
    with Fleet([NODE]) as fleet:
        spec, socket = fleet.generation([NODE], 1), fleet.vaults[NODE].socket
        figures: Figures = pool.one(measured, spec, socket, size, repeats)
        spec = fleet.generation([NODE], 1, floor=Version(spec.number, figures.last))
        back: list[float] = pool.one(restored, spec, socket, size, repeats, figures.last)
    plain, limit, copied = median(figures.plain), median(figures.limit), median(figures.copied)
    step = f"a step of {plain * 1e3:.0f} ms, whose loss is read; {figures.name}"
    pinned = f"pinned copies of {size.nbytes / MIB:.0f} MiB to the host, {size.nbytes / limit / 1e9:.1f} GB/s"
    percent = 100.0 / plain
    return [
        Row(held_up, median(figures.held_up) * percent, "%", *marks(judged, 2.0, 0.2), step),
        Row("GPU: the same in a loop that runs ahead", median(figures.ahead) * percent, "%", against=step),
        Row("GPU: and a step is longer by", (median(figures.beside) - plain) * 1e3, "ms", against=step),
        Row(copy, 100.0 * limit / copied, "%", *marks(judged, 0.0, 90.0), pinned, smaller_is_better=False),
        Row("GPU: restored from its own slot, a new process", median(back) * 1e3, "ms", against="all bytes looked at"),
    ]


def measured(spec: GenerationSpec, socket: str, size: Size, repeats: int) -> Figures:
    """In a process of its own."""
    with ExitStack() as stack:
        gpu = torch.device("cuda", GPU)
        torch.cuda.set_device(gpu)
        one, model, heard = Rank(spec, 0, socket, stack), Model(size, gpu), Heard()
        snapshotter, step = warm(one, model, heard, stack, SnapshotOptions(interval=1, slots=SLOTS_PER_RANK))
        figures = Figures(torch.cuda.get_device_name(gpu))
        on_gpu = torch.ones(size.nbytes, dtype=torch.uint8, device=gpu)
        pinned = torch.empty(size.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(on_gpu)
        for _ in range(repeats):
            torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            pinned.copy_(on_gpu, non_blocking=True)
            torch.cuda.synchronize(gpu)
            figures.limit.append(time.perf_counter() - began)
            step += 1
            model.update(step)
            torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            snapshotter.begin(step)
            snapshotter.wait()  # the stream waits for the copy now
            torch.cuda.synchronize(gpu)
            figures.copied.append(time.perf_counter() - began)
            await_seal(one, step)
        work, count = _Work(gpu, max(SHORTEST_STEP_S, STEP_COPIES * median(figures.limit))), max(repeats, FEWEST_STEPS)
        _, figures.plain = _steps(model, None, work, step, count, reads_loss=True)
        figures.held_up, figures.beside = _steps(model, snapshotter, work, step, count, reads_loss=True)
        figures.ahead, _ = _steps(model, snapshotter, work, step + count, count, reads_loss=False)
        figures.last = step + 2 * count
        await_seal(one, figures.last)
        return figures


class _Work:
    """Compute of about ``seconds`` on a GPU, the same at each call; enqueued."""

    def __init__(self, gpu: torch.device, seconds: float) -> None:
        self.gpu = gpu
        self._a, self._b = (torch.ones(PRODUCT, PRODUCT, device=gpu) for _ in range(2))
        self._out = torch.empty(PRODUCT, PRODUCT, device=gpu)
        self._times = 10
        self.enqueue()
        torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        self.enqueue()
        torch.cuda.synchronize(gpu)
        each_s = (time.perf_counter() - began) / self._times
        self._times = max(1, round(seconds / each_s))

    def enqueue(self) -> None:
        for _ in range(self._times):
            torch.mm(self._a, self._b, out=self._out)


def _steps(
    model: Model, snapshotter: Snapshotter | None, work: _Work, step: int, count: int, *, reads_loss: bool
) -> tuple[list[float], list[float]]:
    """For how long each of ``count`` steps after ``step`` was held up, and what each took where the loss is read."""
    told: list[float | None] = []
    took: list[float] = []
    watch = StepStopwatch(lambda times: told.append(times.blocked_s), SYSTEM_CLOCK)
    for number in range(step + 1, step + 1 + count):
        began = time.perf_counter()
        work.enqueue()
        if snapshotter is not None:
            with watch.blocked():
                snapshotter.wait()
        model.update(number)
        if reads_loss:
            torch.cuda.synchronize(work.gpu)
        watch.end_step([work.gpu])
        if snapshotter is not None:
            with watch.blocked(has_snapshot=True):
                snapshotter.begin(number)
        took.append(time.perf_counter() - began)
    if snapshotter is not None:
        with watch.blocked():
            snapshotter.wait()
    torch.cuda.synchronize(work.gpu)
    for _ in range(2):  # the last step's end is told when it has come
        watch.end_step([work.gpu])
        torch.cuda.synchronize(work.gpu)
    return [held_up for held_up in told if held_up is not None], took


def restored(spec: GenerationSpec, socket: str, size: Size, repeats: int, step: int) -> list[float]:
    """Seconds to fill the state on the GPU from what the vault holds, which must be of ``step``; in a new process."""
    with ExitStack() as stack:
        gpu = torch.device("cuda", GPU)
        torch.cuda.set_device(gpu)
        one, model = Rank(spec, 0, socket, stack), Model(size, gpu)
        took = []
        for number in range(repeats):
            model.spoil()
            torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            restoration = Restoration(one.vault, spec, one.member, PrefixStore(f"restore-{number}", one.store))
            result = restoration.fill(TrackedState({"model": model.module}))
            torch.cuda.synchronize(gpu)
            took.append(time.perf_counter() - began)
            restoration.close()
            assert result.step == step, f"{result.version} was restored, not step {step}: {result.sentence}"
            model.require(step)
        return took
