"""Points of a step at which ranks are killed together, and a training that passes all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from everstep_trainer.run import Run
from everstep_trainer.snapshot.copy import HostMover
from everstep_trainer.snapshot.snapshotter import Snapshotter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everstep.layout.slots import SegmentView, SlotHeader
from tests.support.exact_training import Diary, fingerprint

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
"""In their order: gradients are there; the copy of the step before was waited for; one of two optimizers has stepped;
both have; nothing of the step is stored; some of its bytes are; all are, and the slot does not say so; it says so,
without digests; it is sealed."""
SEED, WIDTH, BATCH = 37, 16, 12
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Kill:
    """These ranks die at ``point`` of ``step``, all of them there, when every rank's gradients of it are there."""

    step: int
    point: str
    ranks: tuple[int, ...]


class Injector:
    """One rank's part in the kills. Ranks see how far the others are by files in ``folder``."""

    def __init__(self, kills: Sequence[Kill], folder: Path, rank: int) -> None:
        self._kills = {kill.step: kill for kill in kills}
        self._folder = folder
        self._rank = rank
        self.step = 0
        self.stored = 0

    def at(self, point: str) -> None:
        """From the training thread, in ``step``."""
        if point == "after reduce" and self.step in self._kills:
            self._mark(f"reduced-{self.step}-{self._rank}")
        self._strike(self.step, point)

    def storing(self, point: str, step: int | None = None) -> None:
        """From whichever thread stores ``step``; by itself the one that was begun last, which is not always the one
        that is sealed: that of the step before may be, until the next is copied."""
        self._strike(self.stored if step is None else step, point)

    def finished(self, step: int) -> None:
        """The step's snapshot has begun."""
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
        deadline = time.perf_counter() + PATIENCE_S
        while not all((self._folder / name).exists() for name in awaited):
            assert time.perf_counter() < deadline, f"never all of {awaited}"
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def _mark(self, name: str) -> None:
        (self._folder / name).touch()


_now: Injector | None = None


def _install() -> None:
    """Once in a process: its snapshots pass the points of the process's present injector."""
    begin, move = Snapshotter.begin, HostMover.run
    mark, seal = SegmentView.mark_copied, SegmentView.seal

    def begun(self: Snapshotter, step: int) -> None:
        assert _now is not None
        _now.at("before begin")
        _now.stored = step
        begin(self, step)
        _now.finished(step)

    def moved(
        self: HostMover, targets: list[torch.Tensor], sources: list[torch.Tensor], *more: Any, **named: Any
    ) -> Any:
        assert _now is not None
        some = len(targets) // 2
        torch._foreach_copy_(targets[:some], sources[:some])
        _now.storing("copying")
        result = move(self, targets, sources, *more, **named)
        _now.storing("copied")
        return result

    def marked(self: SegmentView, slot: int) -> None:
        mark(self, slot)
        header = self.header(slot)
        if _now is not None and header is not None:
            _now.storing("marked", header.version.step)

    def sealed(self: SegmentView, *given: Any, **more: Any) -> SlotHeader:
        header = seal(self, *given, **more)
        if _now is not None:
            _now.storing("sealed", header.version.step)
        return header

    Snapshotter.begin = begun  # type: ignore[method-assign]
    HostMover.run = moved  # type: ignore[method-assign]
    SegmentView.mark_copied = marked  # type: ignore[method-assign]
    SegmentView.seal = sealed  # type: ignore[method-assign]


def shards_of(model: torch.nn.Sequential, run: Run) -> torch.nn.Module:
    """The model under FSDP2: what one rank holds no other has."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=run.mesh)
    return fully_shard(model, mesh=run.mesh)


def train(run: Run, folder: str, until: int, kills: Sequence[Kill] = (), sharded: bool = False) -> None:
    """One model under two optimizers, so that a step can be torn between them."""
    global _now
    if _now is None:
        _install()
    injector = _now = Injector(kills, Path(folder), run.rank)
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
    diary = Diary(Path(folder), run)
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
        diary.write(step, state=fingerprint(held))
