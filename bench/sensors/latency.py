"""Time from a fault on a node until the controller's event stream shows its finding, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.table import Row
from everstep.client import Client
from everstep.wire.v1.operator import Event, EventGap
from everstep_agent.virtual.scenario import DGX_BUS_IDS
from examples.demo.world import Node, World, wait_for

KERNEL_LOG = "a kernel line to the controller's event stream"
CONTROL = "NVML to the controller's event stream, polled at 1 Hz"
FLOOR_MS, AIM_MS = 100.0, 20.0
GPUS = 8
FAULTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("gpu.row_remap_failure", {"remap_failure": True}),
    ("gpu.recovery_action", {"recovery_action": 1}),
    ("gpu.lost", {"lost": True}),
)
"""Faults that the next poll sees, by the kind of finding."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 1.2
"""Seconds between two faults, drawn at random, so that faults come at all times between two polls."""


class _World(World):
    """A controller that logs each finding of a burst."""

    settings = "[policy.findings]\nburst_count = 100\n"


Events = Iterator[Event | EventGap]


def _wait_for(events: Events, key: str) -> float:
    """Return the time (of ``perf_counter``) at which a finding of this key came."""
    for event in events:
        if isinstance(event, Event) and event.kind == "finding" and key in event.detail.get("key", ""):
            return time.perf_counter()
    raise RuntimeError(f"the event stream ended before {key}")


@contextlib.contextmanager
def _node() -> Iterator[tuple[Node, Events]]:
    """Start a controller, and an agent whose kernel log is a named pipe."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as out, _World(Path(out), ["n0"]) as world:
        world.start_controller()
        node = world.nodes["n0"]
        node.kernel_log.unlink()
        os.mkfifo(node.kernel_log)
        node.virtual = f"default:{GPUS}"
        node.boot()
        wait_for(lambda: node.booted, "the agent is up")
        client = Client(world.url, world.operator_token)
        yield node, client.stream(client.status().newest_event)


def measure(repeats: int) -> list[Row]:
    """Return the figures of ``repeats`` faults of each kind. Raises RuntimeError, OSError, TimeoutError."""
    repeats = min(repeats, GPUS * len(FAULTS))
    seconds = [_repeat(cause, repeats) for cause in (_by_line, _by_control)]
    return [*_rows(KERNEL_LOG, seconds[0], FLOOR_MS, AIM_MS), *_rows(CONTROL, seconds[1], None, None)]


def _repeat(cause: Callable[[Node, Events, int], float], repeats: int) -> list[float]:
    """Cause that many faults on one node, and return the seconds that each took."""
    pauses = random.Random(repeats)
    found = []
    with _node() as (node, events):
        for number in range(repeats):
            time.sleep(pauses.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S))
            found.append(cause(node, events, number))
    return found


def _by_line(node: Node, events: Events, number: int) -> float:
    """Write an XID 79 of a GPU that had none, and return the seconds until its finding is shown."""
    gpu = f"0000:{number + 0x80:02x}:00"
    started = time.perf_counter()
    with node.kernel_log.open("w") as pipe:
        pipe.write(f"NVRM: Xid (PCI:{gpu}): 79, pid=1, name=bench, GPU has fallen off the bus.\n")
    return _wait_for(events, f"gpu.xid/{gpu}/79") - started


def _by_control(node: Node, events: Events, number: int) -> float:
    """Let NVML show one more fault of a GPU, and return the seconds until its finding is shown."""
    faults: dict[str, dict[str, object]] = {}
    for earlier in range(number + 1):
        faults.setdefault(str(earlier % GPUS), {}).update(FAULTS[earlier // GPUS][1])
    started = time.perf_counter()
    new = node.control.with_suffix(".new")
    new.write_text(json.dumps({"gpus": faults}))
    new.rename(node.control)
    kind = FAULTS[number // GPUS][0]
    return _wait_for(events, f"{kind}/0000:{DGX_BUS_IDS[number % GPUS]}") - started


def _rows(name: str, seconds: list[float], floor: float | None, aim: float | None) -> list[Row]:
    return [
        Row(f"{name}, median of {len(seconds)}", statistics.median(seconds) * 1e3, "ms", floor, aim),
        Row(f"{name}, slowest", max(seconds) * 1e3, "ms"),
    ]
