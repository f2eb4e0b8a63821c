"""What exact gradients cost: steps of plain DistributedDataParallel and of ``run.replicate`` in turns.

    python -m bench.exactness [--quick] [--sizes 2,25,100] [--ranks 4] [--json FILE]

Ranks are processes of one machine under gloo with one thread each. In each turn every kind trains one step on the same
samples; all ranks begin a step together. The figure is the ratio of the kinds' median steps in the same run. CPU time
is that of all threads of rank 0 in a step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from bench.table import Row, finish, parser_of
from everstep_trainer.parallel.ordered_gradients import replicate

SIZES = {2: (8, 512, 32, 60), 25: (24, 1024, 48, 24), 100: (24, 2048, 48, 8)}
"""By millions of parameters: layers, width, samples of a rank, turns."""
WARM_TURNS = 3
FLOOR, AIM = 1.10, {2: 1.02, 25: 1.03, 100: 1.03}


def train(rank: int, world: int, folder: str, size: int, turns: int) -> None:
    """Train both kinds in turns; rank 0 writes the seconds of their steps to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    layers, width, batch, _ = SIZES[size]
    kinds = []
    for is_exact in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        wrapped = replicate(model, exact=True, equal_already=True) if is_exact else DistributedDataParallel(model)
        kinds.append((wrapped, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9), list[tuple[float, float]]()))
    samples = torch.Generator().manual_seed(rank)
    for _ in range(WARM_TURNS + turns):
        x = torch.randn(batch, width, generator=samples)
        for wrapped, optimizer, seconds in kinds:
            dist.barrier()
            began, cpu_before = perf_counter(), process_time()
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            step_s = perf_counter() - began
            dist.barrier()  # other ranks may still receive from this one
            seconds.append((step_s, process_time() - cpu_before))
    if rank == 0:
        torch.save([seconds[WARM_TURNS:] for _, _, seconds in kinds], Path(folder, "seconds"))
    dist.barrier()


def measure(ranks: int, size: int, turns: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="exactness-") as folder:
        spawn(train, (ranks, folder, size, turns), nprocs=ranks)
        recorded = torch.load(Path(folder, "seconds"))
    medians = [[statistics.median(values) for values in zip(*seconds, strict=True)] for seconds in recorded]
    (plain_s, plain_cpu_s), (exact_s, exact_cpu_s) = medians
    name = f"{size} M parameters"
    return [
        Row(f"{name}: plain step", 1e3 * plain_s, "ms"),
        Row(f"{name}: exact step", 1e3 * exact_s, "ms"),
        Row(f"{name}: exact", exact_s / plain_s, "x", FLOOR, AIM[size], against="plain DDP"),
        Row(f"{name}: CPU time of exact", exact_cpu_s / plain_cpu_s, "x", against="plain DDP"),
    ]


def main() -> int:
    parser = parser_of("exactness", __doc__)
    parser.add_argument("--sizes", default="2,25,100", help="millions of parameters")
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    rows: list[Row] = []
    for size in map(int, given.sizes.split(",")):
        rows += measure(given.ranks, size, 5 if given.quick else SIZES[size][3])
    return finish("Exact gradients: the step beside plain DistributedDataParallel", rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
