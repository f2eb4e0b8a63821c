"""The agent's sensors on real GPUs: every value that NVML gives, events, and the probe of two processes.

Tests marked gpu run the probes of a node alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from statistics import median
from unittest import mock

from bench.gpu_steps.sheet import Sheet, not_run
from bench.table import Row
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.directives import RunProbe
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import flat_fields
from everstep_agent.probes.prober import Prober
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall

POLLS = 5
PROBE_S = 60.0
SLOW_POLL_MS, GOOD_POLL_MS = 1000.0, 50.0
"""Of one poll of all GPUs: the agent polls once a second."""
NODES = ("n1", "n2")
OPTIONAL = ("index", "pci_bus_id", "uuid", "lost", "error")


class NoGpuListed(Exception):
    """NVML is not there or lists nothing, where torch has found a GPU."""


def step(sheet: Sheet, device: str) -> None:
    if device == "cpu":
        install(VirtualMachine(load_scenario("default:2", "n1"), control_path=""), SYSTEM_CLOCK)
    try:
        nvml(sheet)
    except NoGpuListed as error:
        sheet.add(Row("NVML: GPUs read whole", None, "", 1, against=str(error)))
    finally:
        if device == "cpu":
            uninstall()
    sheet.add(*asyncio.run(all_reduce(device)))


def nvml(sheet: Sheet) -> None:
    """Polls of all GPUs, as the agent's sensor process makes them."""
    sensor = GpuSensor(slow_every=1, set_activity=lambda what: None, reads_gpm=True)
    took = []
    try:
        for _ in range(POLLS):
            began = time.perf_counter()
            samples = sensor.poll()
            took.append(time.perf_counter() - began)
        if not samples:
            raise NoGpuListed(f"NVML lists no GPU: {sensor.error or 'it gives no reason'}")
        sheet.note(gpus=[gpu.name for gpu in sensor.known_gpus.values()], driver=sensor.driver_version)
        sheet.add(
            *sample_rows(samples),
            Row("NVML: one poll of all GPUs", median(took[1:]) * 1e3, "ms", SLOW_POLL_MS, GOOD_POLL_MS),
            event_row(sensor),
        )
    finally:
        sensor.close()


def sample_rows(samples: tuple[GpuSample, ...]) -> list[Row]:
    """How many GPUs could be read, and which values the first of them does not offer."""
    whole = [sample for sample in samples if not sample.error and not sample.lost]
    troubles = "; ".join(f"GPU {sample.index}: {sample.error}" for sample in samples if sample.error)
    fields = {name: value for name, value in flat_fields(samples[0]).items() if name not in OPTIONAL}
    absent = [name for name, value in fields.items() if value is None]
    offered = f"of {len(fields)}" + (f"; not offered: {', '.join(absent)}" if absent else "")
    return [
        Row("NVML: GPUs read whole", len(whole), "", len(samples), len(samples), troubles, smaller_is_better=False),
        Row("NVML: values that the first offers", len(fields) - len(absent), "", against=offered),
    ]


def event_row(sensor: GpuSensor) -> Row:
    """Return a row that says whether NVML can wait for XID events."""
    events = sensor.wait_xid_events(0.0)
    found = "no event set: XIDs come from the kernel log alone" if events is None else f"{len(events)} pending"
    return Row("NVML: XID events can be waited for", float(events is not None), "", against=found)


async def all_reduce(device: str) -> list[Row]:
    """Of two probe processes, each with a GPU of its own under NCCL; over gloo where they would share one."""
    import torch

    backend = "nccl" if device == "cuda" and torch.cuda.device_count() > 1 else "gloo"
    probers, tasks = [Prober() for _ in NODES], []
    probe = RunProbe(
        probe="bench-all-reduce",
        nodes=NODES,
        store="127.0.0.1:0",
        backend=backend,
        sizes=(8, 16 << 20),
        repeats=3,
        timeout_s=PROBE_S,
        trace=str(os.getpid()),
        kind=ProbeKind.ALL_REDUCE,
    )
    with mock.patch.dict(os.environ):
        for number, (node, prober) in enumerate(zip(NODES, probers, strict=True)):
            if backend == "nccl":
                os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # inherited by the process that is started now
            tasks.append(asyncio.create_task(prober.run(probe, node)))
            while prober.pid is None and not tasks[-1].done():
                await asyncio.sleep(0.01)
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for prober in probers:
                await prober.close()
    rows = []
    if device == "cuda" and backend == "gloo":
        rows.append(not_run("probe: all-reduce over NCCL", "NCCL takes one process per GPU, and there is one GPU"))
    name = f"probe: all-reduce over {backend}, two processes"
    failed = [answer.detail for answer in answers if not answer.ok]
    if failed:
        return [*rows, Row(name, None, "", 0, against=failed[0])]
    size, seconds, rate = answers[0].rows[-1]
    return [*rows, Row(name, rate / 1e9, "GB/s", against=f"{size >> 20} MiB in {seconds * 1e3:.1f} ms, bus bandwidth")]
