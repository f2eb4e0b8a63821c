"""Kill ranks together at a point of a step, in a training that passes all points."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everstep.layout.slot_header import SlotHeader
from everstep.layout.slots import SegmentView
from everstep_trainer.run import Run
from everstep_trainer.slots.copy import HostMover, SlotTargets
from everstep_trainer.snapshot.snapshotter import Snapshotter
from tests.support.ranks.exact_training import StepLog, fingerprint

POINTS = (
    "after reduce",
    "before step",
    "between two optimizers",
    "after step",
    "before begin",
    "copying",
    "copied",
    "marked",
    "sealed",
)
"""The points in their order.

They are: gradients are computed; the previous step is copied; one of two optimizers has stepped; both optimizers have
stepped; no byte of the step is copied; some bytes are copied; all bytes are copied, and the slot's header is unchanged;
the header shows the copy, without digests; the slot is sealed.
"""
SEED, WIDTH, BATCH = 37, 16, 12
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Kill:
    """Kill these ranks together at ``point`` of ``step``, once all of them are there and all ranks have gradients."""

    step: int
    point: str
    ranks: tuple[int, ...]


class Injector:
    """The kills of one rank. Files in ``folder`` show the progress of all ranks."""

    def __init__(self, kills: Sequence[Kill], folder: Path, rank: int) -> None:
        self._kills = {kill.step: kill for kill in kills}
        self._folder = folder
        self._rank = rank
        self.step = 0
        self.stored = 0

    def at(self, point: str) -> None:
        """Pass a point of ``step`` in the training thread."""
        if point == "after reduce" and self.step in self._kills:
            self._mark(f"reduced-{self.step}-{self._rank}")
        self._strike(self.step, point)

    def storing(self, point: str, step: int | None = None) -> None:
        """Pass a point in the thread that stores ``step``, by default the step that was begun last.

        The step that is being sealed may be the one before, until the next one is copied.
        """
        self._strike(self.stored if step is None else step, point)

    def finished(self, step: int) -> None:
        """Note that the step's snapshot has begun."""
        if step in self._kills:
            self._mark(f"finished-{step}-{self._rank}")

    def _strike(self, step: int, point: str) -> None:
        kill = self._kills.get(step)
        if kill is None or kill.point != point or self._rank not in kill.ranks:
            return
        own = f"died-{step}-{self._rank}"
        if (self._folder / own).exists():
            return
        self._mark(own)
        awaited = [f"died-{step}-{rank}" for rank in kill.ranks] + [f"reduced-{step}-{rank}" for rank in range(3)]
        deadline = time.perf_counter() + DEADLINE_S
        while not all((self._folder / name).exists() for name in awaited):
            assert time.perf_counter() < deadline, f"missing files among {awaited}"
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def _mark(self, name: str) -> None:
        (self._folder / name).touch()


_current: Injector | None = None


def _install() -> None:
    """Wrap the process's snapshots once, so that they pass the points of the current injector."""
    begin, move = Snapshotter.begin, HostMover.run
    mark, seal = SegmentView.mark_copied, SegmentView.seal

    def begun(self: Snapshotter, step: int) -> None:
        assert _current is not None
        _current.at("before begin")
        _current.stored = step
        begin(self, step)
        _current.finished(step)

    def moved(self: HostMover, targets: SlotTargets, sources: list[torch.Tensor], *more: Any, **named: Any) -> Any:
        assert _current is not None
        some = len(targets) // 2
        torch._foreach_copy_(targets[:some], sources[:some])
        _current.storing("copying")
        result = move(self, targets, sources, *more, **named)
        _current.storing("copied")
        return result

    def marked(self: SegmentView, slot: int) -> None:
        mark(self, slot)
        header = self.header(slot)
        if _current is not None and header is not None:
            _current.storing("marked", header.version.step)

    def sealed(self: SegmentView, *given: Any, **more: Any) -> SlotHeader:
        header = seal(self, *given, **more)
        if _current is not None:
            _current.storing("sealed", header.version.step)
        return header

    Snapshotter.begin = begun  # type: ignore[method-assign]
    HostMover.run = moved  # type: ignore[method-assign]
    SegmentView.mark_copied = marked  # type: ignore[method-assign]
    SegmentView.seal = sealed  # type: ignore[method-assign]


def shards_of(model: torch.nn.Sequential, run: Run) -> torch.nn.Module:
    """Return the model under FSDP2, without replicas."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    return model


def train(run: Run, folder: str, until: int, kills: Sequence[Kill] = (), sharded: bool = False) -> None:
    """Train one model with two optimizers, so that a kill can hit between their steps."""
    global _current
    if _current is None:
        _install()
    injector = _current = Injector(kills, Path(folder), run.rank)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    body, head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
    replicas = shards_of(model, run) if sharded else run.replicate(model)
    first = torch.optim.AdamW(body.parameters(), lr=1e-2)
    second = torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9)
    sampler = run.sampler(200, global_batch=BATCH, seed=SEED)
    run.track(model=replicas, first=first, second=second)
    first.register_step_pre_hook(lambda *_: injector.at("before step"))
    step_log = StepLog(Path(folder), run)
    for step in run.steps(until=until, seed=SEED):
        injector.step = step
        inputs = torch.sin(torch.outer(sampler.indices(step) + 1.0, torch.arange(1.0, WIDTH + 1)))
        replicas(inputs).square().mean().backward()
        injector.at("after reduce")
        first.step()
        injector.at("between two optimizers")
        second.step()
        model.zero_grad()
        injector.at("after step")
        moments = [state[key] for o in (first, second) for state in o.state.values() for key in sorted(state)]
        held = [t.to_local() if isinstance(t, DTensor) else t for t in [*model.parameters(), *moments]]
        step_log.write(step, state=fingerprint(held))
