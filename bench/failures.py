"""How fleets fail: causes with their rates (``data/failure_rates.csv``, each with its source), lemons, and shocks.

A node's own causes come at the table's rate times its frailty, which is log-normal with mean 1: most nodes are better
than the average, a few are much worse. With ``SIGMA`` 1.5 the worst 5 % of nodes have 44 % of the faults; of 63 nodes
in production three caused half of all exclusions (Meta RSC). Causes that take several nodes strike neighbours of one
rack. The table counts interruptions of the job, so a shock counts once at the table's rate, however wide it is.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "data" / "failure_rates.csv"
SIGMA = 1.5
GPUS_PER_NODE = 8
NODES_PER_RACK = 16


@dataclass(frozen=True)
class Cause:
    """One row of the table. ``width``: least and most nodes that one shock takes."""

    name: str
    per_gpu_hour: float
    width: tuple[int, int]
    repair_h: float


@dataclass(frozen=True, order=True)
class Failure:
    """At ``at_h`` hours, ``cause`` strikes ``nodes`` (indices in the fleet)."""

    at_h: float
    cause: str
    nodes: tuple[int, ...]


def load(path: Path = TABLE) -> list[Cause]:
    """The table's rows."""
    with path.open(newline="") as file:
        return [_cause(row) for row in csv.DictReader(file)]


def _cause(row: dict[str, str]) -> Cause:
    low, _, high = row["correlated_nodes"].partition("-")
    return Cause(
        name=row["cause"],
        per_gpu_hour=float(row["per_gpu_hour"]),
        width=(int(low), int(high or low)),
        repair_h=float(row["repair_hours"]),
    )


def frailties(nodes: int, rng: random.Random, sigma: float = SIGMA) -> list[float]:
    """Each node's factor on every rate; their mean is 1."""
    drawn = [rng.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(nodes)]
    mean = math.fsum(drawn) / nodes
    return [value / mean for value in drawn]


def schedule(
    nodes: int,
    hours: float,
    rng: random.Random,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    per_rack: int = NODES_PER_RACK,
    rate: float = 1.0,
    sigma: float = SIGMA,
) -> list[Failure]:
    """Every failure of a fleet in ``hours``, in order of time.

    Args:
        rate: a factor on all rates.
    """
    weights = frailties(nodes, rng, sigma)
    failures = []
    for cause in load():
        per_hour = cause.per_gpu_hour * gpus_per_node * nodes * rate
        count = _poisson(per_hour * hours, rng)
        firsts = rng.choices(range(nodes), weights=weights, k=count)
        for first in firsts:
            width = rng.randint(*cause.width)
            failures.append(Failure(rng.uniform(0, hours), cause.name, _neighbours(first, width, nodes, per_rack)))
    return sorted(failures)


def _neighbours(first: int, width: int, nodes: int, per_rack: int) -> tuple[int, ...]:
    """``width`` nodes of the rack of ``first``, itself among them."""
    rack = first // per_rack * per_rack
    size = min(per_rack, nodes - rack)
    return tuple(sorted(rack + (first - rack + i) % size for i in range(min(width, size))))


def _poisson(mean: float, rng: random.Random) -> int:
    """Exponential gaps inside a unit of time."""
    count, at = 0, rng.expovariate(mean) if mean > 0 else 2.0
    while at < 1.0:
        count += 1
        at += rng.expovariate(mean)
    return count
