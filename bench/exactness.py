"""What exact mode costs: a step with virtual ranks beside one of DDP or FSDP2 in the same processes.

    python -m bench.exactness [--quick] [--steps 95] [--width 512] [--ranks 4 3 2 1] [--json FILE]

8 x Linear(512, 512) under AdamW (2.1 M parameters; --width 1792 has 25.7 M), a global batch of 32, gloo on this
machine, one thread a rank. The kinds take turns, ten steps each, so that a busy machine is busy for all. Exact mode
does as many passes as there are virtual ranks, each over fewer samples; its communication does not overlap with the
backward pass. Under FSDP2, where each layer is sharded for itself, each pass gathers the parameters and sends
gradients, and clipping is timed apart.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from rich.progress import Progress
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.table import Row, finish, parser_of
from bench.workload import BATCH, WIDTH, build_model

VIRTUAL, SAMPLES, TURN, WARM_UP = 4, 1024, 10, 5
DDP, ORDERED, VIRTUALLY = "DDP", "in the order of ranks", f"{VIRTUAL} virtual ranks"
FSDP, SHARDED = "FSDP2", f"FSDP2 with {VIRTUAL} virtual ranks"
KINDS = (DDP, ORDERED, VIRTUALLY, FSDP, SHARDED)
FLOOR, AIM = 1.5, 1.1
"""Of a step with as many virtual ranks as ranks, in steps of plain DDP: on fewer, passes over small batches cost more
than one over a large batch, by as much as kernels lose on small ones."""


@dataclass
class Measured:
    """Of rank 0: seconds of each step by kind, and the parameters after the same number of steps of each."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    clipping: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in (FSDP, SHARDED)})
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class Training:
    """One kind's model and a step of it."""

    def __init__(self, kind: str, run: Run, data: torch.Tensor) -> None:
        self.run, self.data = run, data
        self.model = build_model(width=data.shape[1])
        self.whole: nn.Module = self.model
        if kind in (FSDP, SHARDED):
            for layer in (*(part for part in self.model if isinstance(part, nn.Linear)), self.model):
                fully_shard(layer, mesh=run.mesh)
        if kind == DDP and run.distributed:
            self.whole = DistributedDataParallel(self.model)
        elif kind not in (DDP, FSDP):
            self.whole = run.replicate(self.model, virtual_ranks=None if kind == ORDERED else VIRTUAL)
        self._clip = run.clip_grad_norm_ if kind == SHARDED else nn.utils.clip_grad_norm_
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)

    def step(self, number: int) -> float:
        """Returns the seconds that clipping took, which changes nothing."""
        for part in self.run.parts(self.sampler, number):
            loss = self.whole(self.data[part.indices]).square().mean()
            (loss * part.loss_weight).backward()
        clipped = time.perf_counter()
        if isinstance(next(self.model.parameters()), DTensor):
            self._clip(self.model.parameters(), 1e9)
        clipped = time.perf_counter() - clipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        return clipped


def rank_main(rank: int, world: int, folder: str, steps: int, width: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    data = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(0))
    grouped = RankContext(rank=rank, world_size=world, mesh=lambda: init_device_mesh("cpu", (world,)))
    trainings = {
        kind: Training(
            kind, Run(grouped if world > 1 or kind in (FSDP, SHARDED) else RankContext(), TrainingSession()), data
        )
        for kind in KINDS
    }
    measured = Measured()
    for turn in range(-(-(steps + WARM_UP) // TURN)):
        for kind, training in trainings.items():
            for number in range(turn * TURN + 1, (turn + 1) * TURN + 1):
                began = time.perf_counter()
                clipped = training.step(number)
                if number > WARM_UP:
                    measured.seconds[kind].append(time.perf_counter() - began - clipped)
                    if kind in measured.clipping:
                        measured.clipping[kind].append(clipped)
    for kind, training in trainings.items():
        measured.parameters[kind] = torch.cat([whole(p).reshape(-1) for p in training.model.parameters()])
    if rank == 0:
        torch.save(measured.__dict__, f"{folder}/measured-{world}")
    dist.destroy_process_group()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def measure(world: int, steps: int, width: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        processes.spawn(rank_main, (world, folder, steps, width), nprocs=world)  # type: ignore[no-untyped-call]
        return Measured(**torch.load(f"{folder}/measured-{world}", weights_only=True))


def rows_of(worlds: dict[int, Measured]) -> list[Row]:
    rows = []
    for world, measured in worlds.items():
        on = f"{world} ranks" if world > 1 else "1 rank"
        medians = {kind: statistics.median(seconds) for kind, seconds in measured.seconds.items()}
        rows += [Row(f"{on}: step, {kind}", medians[kind] * 1000, "ms") for kind in KINDS]
        against = f"{DDP} on {on}, same run"
        rows.append(Row(f"{on}: {ORDERED}", medians[ORDERED] / medians[DDP], "x", against=against))
        judged = (FLOOR, AIM) if world == VIRTUAL else (None, None)
        rows.append(Row(f"{on}: {VIRTUALLY}", medians[VIRTUALLY] / medians[DDP], "x", *judged, against))
        against = f"{FSDP} on {on}, same run"
        rows.append(Row(f"{on}: {SHARDED}", medians[SHARDED] / medians[FSDP], "x", *judged, against))
        clipping = {kind: statistics.median(seconds) for kind, seconds in measured.clipping.items()}
        rows += [Row(f"{on}: clipping, {kind}", clipping[kind] * 1000, "ms") for kind in (FSDP, SHARDED)]
    if 1 not in worlds:
        return rows
    reference: dict[str, str] = {VIRTUALLY: VIRTUALLY, SHARDED: VIRTUALLY, DDP: DDP, FSDP: FSDP}
    differing: Callable[[str], int] = lambda kind: max(  # noqa: E731
        int((m.parameters[kind] != worlds[1].parameters[reference[kind]]).sum()) for m in worlds.values()
    )
    for kind, plain in ((VIRTUALLY, DDP), (SHARDED, FSDP)):
        what = f"parameters that differ from one rank's, {kind}"
        count = f"of {worlds[1].parameters[plain].numel() / 1e6:.1f} M"
        rows.append(Row(what, differing(kind), count, 0, 0, f"{plain}: {differing(plain)}"))
    return rows


def main() -> int:
    parser = parser_of("exactness", __doc__)
    parser.add_argument("--steps", type=int, default=95, help="steps of each kind that are timed")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the layers")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 3, 2, 1], help="numbers of ranks")
    given = parser.parse_args()
    steps = 25 if given.quick else given.steps
    worlds: dict[int, Measured] = {}
    with Progress(transient=True) as bar:
        for world in bar.track(given.ranks, description="exactness"):
            worlds[world] = measure(world, steps, given.width)
    return finish("Exact mode beside DistributedDataParallel and FSDP2", rows_of(worlds), given.json)


if __name__ == "__main__":
    sys.exit(main())
