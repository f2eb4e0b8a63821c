"""Snapshots of a bf16 training of a billion parameters, and its restore in a new process.

Stall: for how long the training stream stands still for a snapshot, against a step whose loss is read. Copy: from an
idle device into the slot, against copies of as many bytes into page-locked memory in the same run.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median

import torch
from torch._C._distributed_c10d import PrefixStore

from bench.checkpoint_rows.rank import SEAL_S, WARM_UPS, Heard, Rank
from bench.checkpoint_rows.single import NODE
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.gpu_steps.gpt import Shape, Training
from bench.gpu_steps.sheet import NotRun, Sheet
from bench.processes import ProcessPool
from bench.table import Row, marks
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.digests.digest import WeightedDigest
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.snapshot.pace import StepStopwatch
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

SHAPES = (
    Shape("1 B parameters", layers=20, width=2048, heads=16),
    Shape("0.4 B parameters", layers=8, width=2048, heads=16),
    Shape("0.1 B parameters", layers=2, width=2048, heads=16),
)
"""The first for which there is memory."""
TINY = Shape("tiny", layers=1, width=32, heads=2, vocabulary=64, batch=2, length=16)
ROOM_BYTES = 4 << 30
"""Of the host's memory, left to everything else."""
STALL_FLOOR, STALL_AIM = 2.0, 0.2
COPY_FLOOR, COPY_AIM = 70.0, 90.0
WARM_UP_S, RETRY_S = 90.0, 5.0
REPEATS, STEPS, CPU_REPEATS, CPU_STEPS = 5, 12, 2, 4


@dataclass
class Figures:
    """Seconds: of pinned copies of the same bytes (``limit``), of a copy into a slot (``copied``), from ``begin`` until
    a snapshot is sealed (``sealed``), of a step without snapshots (``plain``) and with them (``beside``), and for how
    long each snapshot held training up, every ``every`` steps (``stalls``) and at each step (``dense``). ``state``: the
    digest of everything tracked at step ``last``."""

    nbytes: int
    limit: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    sealed: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    every: int = 1
    last: int = 0
    state: int = 0


@dataclass
class Back:
    """Seconds of each restore, and of pinned copies of as many bytes to the device."""

    filled: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)


def step(sheet: Sheet, device: str) -> None:
    measure(sheet, device, fitting(SHAPES) if device == "cuda" else TINY)


def fitting(shapes: tuple[Shape, ...]) -> Shape:
    """The first whose slots fit into shared memory, with a page-locked copy beside them. Raises NotRun."""
    shared = shutil.disk_usage("/dev/shm").free
    host = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    for shape in shapes:
        slots = SLOTS_PER_RANK * shape.state_bytes
        if slots < 0.95 * shared and slots + shape.state_bytes + ROOM_BYTES < host:
            return shape
    raise NotRun(f"/dev/shm has {shared >> 30} GiB free and the host {host >> 30}: too little for {shapes[-1].name}")


def measure(sheet: Sheet, device: str, shape: Shape, compiled: str = "", name: str = "training") -> None:
    """Train, store and restore in processes of their own; rows as they are known."""
    judged = device == "cuda"
    repeats, steps = (REPEATS, STEPS) if judged else (CPU_REPEATS, CPU_STEPS)
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool, Fleet([NODE]) as fleet:
        spec, socket = fleet.generation([NODE], 1), fleet.vaults[NODE].socket
        figures: Figures = pool.one(trained, spec, socket, shape, device, compiled, repeats, steps)
        sheet.add(*snapshot_rows(f"{name}, {shape.name}", figures, judged))
        spec = fleet.generation([NODE], 1, floor=Version(spec.number, figures.last))
        back: Back = pool.one(restored, spec, socket, shape, device, repeats, figures.last, figures.state)
        sheet.add(*restore_rows(f"{name}, {shape.name}", figures.nbytes, back))


def snapshot_rows(name: str, figures: Figures, judged: bool) -> list[Row]:
    plain, limit, copied = median(figures.plain), median(figures.limit), median(figures.copied)
    step = f"a step of {plain * 1e3:.0f} ms whose loss is read, a snapshot every {figures.every}"
    pinned = f"pinned copies of {figures.nbytes / 1e9:.2f} GB, {figures.nbytes / limit / 1e9:.1f} GB/s"
    stall, copy = marks(judged, STALL_FLOOR, STALL_AIM), marks(judged, COPY_FLOOR, COPY_AIM)
    percent = 100.0 / plain
    return [
        Row(f"{name}: step", plain * 1e3, "ms"),
        Row(f"{name}: held up by a snapshot, against the step", median(figures.stalls) * percent, "%", *stall, step),
        Row(f"{name}: step beside snapshots", median(figures.beside) * 1e3, "ms", against=step),
        Row(f"{name}: held up by one each step", median(figures.dense) * percent, "%", against="waits for a seal"),
        Row(f"{name}: copied and sealed", median(figures.sealed) * 1e3, "ms", against="nothing else under way"),
        Row(f"{name}: copy against pinned copies", 100.0 * limit / copied, "%", *copy, pinned, smaller_is_better=False),
    ]


def restore_rows(name: str, nbytes: int, back: Back) -> list[Row]:
    filled, limit = median(back.filled), median(back.limit)
    against = f"pinned copies to the device, {nbytes / limit / 1e9:.1f} GB/s; every byte compared"
    return [
        Row(f"{name}: restored in a new process", filled * 1e3, "ms", against="from its own slot, median"),
        Row(f"{name}: the first restore there", back.filled[0] * 1e3, "ms", against="with pages to be mapped"),
        Row(f"{name}: restore against pinned copies", 100 * limit / filled, "%", None, None, against, False),
    ]


# --- in a process of its own -------------------------------------------------------------------------------------


def trained(
    spec: GenerationSpec, socket: str, shape: Shape, device: str, compiled: str, repeats: int, steps: int
) -> Figures:
    """Train with and without snapshots of all steps' state."""
    with ExitStack() as stack:
        where = _use(device)
        one, run, heard = Rank(spec, 0, socket, stack), Training(shape, where, compiled), Heard()
        run.gradients()
        run.update()  # makes the moments
        state = TrackedState({"model": run.model, "optimizer": run.optimizer})
        choices = SnapshotOptions(interval=1, slots=SLOTS_PER_RANK)
        snapshotter = Snapshotter(one.vault, state, spec, one.member, one.store, heard.hear, options=choices)
        stack.callback(snapshotter.close, finish=True)
        figures, loop = Figures(sum(tensor.nbytes for tensor in run.state())), Loop(run, snapshotter, where)
        figures.limit = pinned_copies(figures.nbytes, where, repeats, to_host=True)
        loop.warm_up(heard)
        for _ in range(repeats):
            loop.alone(heard, figures)
        figures.plain, _ = loop.steps(steps, 0)
        seal_s, step_s = median(figures.sealed), median(figures.plain)
        figures.every = max(1, ceil(1.2 * seal_s / step_s))
        figures.beside, figures.stalls = loop.steps(max(steps, 4 * figures.every), figures.every)
        _, figures.dense = loop.steps(steps, 1)
        loop.alone(heard, Figures(0))
        figures.last, figures.state = loop.step, WeightedDigest(run.state()).value()
        return figures


class Loop:
    """The training's steps, with a snapshot where it is asked for."""

    def __init__(self, run: Training, snapshotter: Snapshotter, where: torch.device) -> None:
        self._run = run
        self._snapshotter = snapshotter
        self._where = where
        self.step = 0

    def warm_up(self, heard: Heard) -> None:
        """Until each slot was written: segments are there, page-locked, and their pages mapped.

        Page-locking tens of gigabytes takes longer than training waits for a plan, so that the first steps are not
        stored. Raises RuntimeError where none is within WARM_UP_S.
        """
        deadline, done = time.monotonic() + WARM_UP_S, 0
        while done < WARM_UPS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{done} of {WARM_UPS} snapshots were sealed in {WARM_UP_S:.0f} s; the log says why")
            done += self._store(heard, Figures(0), RETRY_S)

    def alone(self, heard: Heard, figures: Figures) -> None:
        """A step, and its snapshot while the device does nothing else. Raises RuntimeError where it is not sealed."""
        if not self._store(heard, figures, SEAL_S):
            raise RuntimeError(f"step {self.step} was not sealed; the log says why")

    def _store(self, heard: Heard, figures: Figures, patience_s: float) -> bool:
        """Whether the step that is made now was sealed within ``patience_s``; only then there are figures of it."""
        self._compute()
        self._snapshotter.update_versions(None, self.step)  # what may be committed is reported when it is sealed
        _synchronize(self._where)
        began = time.perf_counter()
        self._snapshotter.begin(self.step)
        self._snapshotter.wait()  # the stream waits for the copy now
        _synchronize(self._where)
        copied = time.perf_counter() - began
        if not heard.wait(self.step, patience_s):
            return False
        figures.copied.append(copied)
        figures.sealed.append(heard.at[self.step] - began)
        return True

    def _compute(self) -> None:
        self.step += 1
        self._run.gradients()
        self._snapshotter.wait()
        self._run.update()

    def steps(self, count: int, every: int) -> tuple[list[float], list[float]]:
        """Seconds of each of ``count`` steps, and for how long each snapshot held them up. ``every`` 0: no snapshot."""
        told: list[float | None] = []
        took: list[float] = []
        watch = StepStopwatch(lambda times: told.append(times.blocked_s), SYSTEM_CLOCK)
        gpus = [self._where] if self._where.type == "cuda" else []
        for number in range(count):
            began = time.perf_counter()
            self.step += 1
            loss = self._run.gradients()
            with watch.blocked():
                self._snapshotter.wait()
            self._run.update()
            loss.item()
            watch.end_step(gpus)
            if every and number % every == 0:
                with watch.blocked(has_snapshot=True):
                    self._snapshotter.begin(self.step)
            took.append(time.perf_counter() - began)
        with watch.blocked():
            self._snapshotter.wait()
        for _ in range(2):  # a step's end is told once it has come
            _synchronize(self._where)
            watch.end_step(gpus)
        return took[1:], [held_up for held_up in told if held_up is not None]


def restored(
    spec: GenerationSpec, socket: str, shape: Shape, device: str, repeats: int, step: int, expected: int
) -> Back:
    """Fill a new model and optimizer from the vault; raises AssertionError where a byte is not that of ``step``."""
    with ExitStack() as stack:
        where = _use(device)
        one, back = Rank(spec, 0, socket, stack), Back()
        for number in range(repeats):
            run = Training(shape, where)
            _synchronize(where)
            began = time.perf_counter()
            store = PrefixStore(f"restore-{number}", one.store)
            restoration = Restoration(one.vault, spec, one.member, store)
            result = restoration.fill(TrackedState({"model": run.model, "optimizer": run.optimizer}))
            _synchronize(where)
            back.filled.append(time.perf_counter() - began)
            restoration.close()
            assert result.step == step, f"{result.version} was restored, not step {step}: {result.sentence}"
            found = WeightedDigest(run.state()).value()
            assert found == expected, f"the restored state has digest {found:016x}, step {step} had {expected:016x}"
            nbytes = sum(tensor.nbytes for tensor in run.state())
            del run
        back.limit = pinned_copies(nbytes, where, repeats, to_host=False)
        return back


def pinned_copies(nbytes: int, where: torch.device, repeats: int, *, to_host: bool) -> list[float]:
    """Seconds of copies between page-locked memory and the device, one after another. On the CPU plain memory."""
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=where.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    target, source = (pinned, there) if to_host else (there, pinned)
    took = []
    for number in range(repeats + 1):
        _synchronize(where)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize(where)
        if number:  # the first one finds things cold
            took.append(time.perf_counter() - began)
    return took


def _use(device: str) -> torch.device:
    where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    return where


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
