"""The agent's eyes on real GPUs: every value that NVML gives, events, and the probe process on the GPU."""

from __future__ import annotations

import asyncio
import os
import time
from statistics import median
from typing import Any

from bench.gpu_steps.sheet import Sheet, not_run
from bench.table import Row
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from everstep_agent.drivers.samples import GpuSample
from everstep_agent.probes.child import MATMUL_SIZE_CPU, MATMUL_SIZE_CUDA
from everstep_agent.probes.prober import Prober
from everstep_agent.sensors.gpu import GpuSensor
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall

POLLS = 5
PROBE_S = 60.0
SLOW_POLL_MS, GOOD_POLL_MS = 1000.0, 50.0
"""Of one poll of all GPUs: the agent polls once a second."""
OPTIONAL = ("index", "pci_bus_id", "uuid", "lost", "error")
GROUPS = {
    "clocks and throttling": ("sm_clock_mhz", "memory_clock_mhz", "throttle_reasons"),
    "ECC and remapped rows": ("ecc_uncorrected", "remapped_uncorrected", "remap_pending", "sram_threshold_exceeded"),
    "errors of DRAM and SRAM": ("ecc_dram_corrected", "ecc_sram_corrected", "banks_without_spare_rows"),
    "limits": ("power_limit_default_w", "slowdown_temperature_c", "memory_temperature_limit_c"),
    "modes": ("ecc_mode", "mig_mode", "persistence_mode"),
    "GPM": ("graphics_activity", "tensor_activity", "dram_activity"),
    "NVLink": ("nvlinks", "nvlinks_down", "nvlink_errors"),
    "PCIe": ("pcie_generation", "pcie_width", "pcie_replays"),
}


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
    asyncio.run(probes(sheet, device))


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
        sheet.add(*sample_rows(samples), poll_row(took[1:]), event_row(sensor))
    finally:
        sensor.close()


def sample_rows(samples: tuple[GpuSample, ...]) -> list[Row]:
    """How many GPUs could be read, and which values the first of them does not offer."""
    whole = [sample for sample in samples if not sample.error and not sample.lost]
    troubles = "; ".join(f"GPU {sample.index}: {sample.error}" for sample in samples if sample.error)
    fields = [name for name in GpuSample.__struct_fields__ if name not in OPTIONAL]
    absent = [name for name in fields if getattr(samples[0], name) is None]
    rows = [
        Row("NVML: GPUs read whole", len(whole), "", len(samples), len(samples), troubles, smaller_is_better=False),
        Row("NVML: values that the first offers", len(fields) - len(absent), "", against=_without(fields, absent)),
    ]
    for group, names in GROUPS.items():
        there = [name for name in names if name not in absent]
        missing = [name for name in names if name in absent]
        rows.append(Row(f"NVML: {group}", len(there), "values", against=_without(names, missing)))
    return rows


def _without(names: Any, absent: list[str]) -> str:
    return f"of {len(names)}" + (f"; not offered: {', '.join(absent)}" if absent else "")


def poll_row(took: list[float]) -> Row:
    return Row("NVML: one poll of all GPUs", median(took) * 1e3, "ms", SLOW_POLL_MS, GOOD_POLL_MS)


def event_row(sensor: GpuSensor) -> Row:
    """Return a row that says whether NVML can wait for XID events."""
    events = sensor.wait_xid_events(0.0)
    found = "no event set: XIDs come from the kernel log alone" if events is None else f"{len(events)} pending"
    return Row("NVML: XID events can be waited for", float(events is not None), "", against=found)


async def probes(sheet: Sheet, device: str) -> None:
    """The probes of a node alone; then an all-reduce of two, over gloo where they would share one GPU."""
    for kind in (ProbeKind.COMPUTE, ProbeKind.MEMORY):
        prober = Prober()
        try:
            answer = await prober.run(_probe(kind, ("n1",)), "n1")
        finally:
            await prober.close()
        sheet.add(*alone_rows(kind, answer, device))
    sheet.add(*await all_reduce(device))


def _probe(kind: ProbeKind, nodes: tuple[str, ...], backend: str = "gloo") -> RunProbe:
    return RunProbe(
        probe=f"bench-{kind.value}",
        nodes=nodes,
        store="127.0.0.1:0",
        backend=backend,
        sizes=(8, 16 << 20),
        repeats=3,
        timeout_s=PROBE_S,
        trace=str(os.getpid()),
        kind=kind,
    )


def alone_rows(kind: ProbeKind, answer: ProbeFinished, device: str) -> list[Row]:
    """A row for each device that answered; one that is not met where the probe failed."""
    name = f"probe: {kind.value}"
    if not answer.ok:
        return [Row(name, None, "", 0, against=answer.detail)]
    rows = []
    for number, (size, seconds, rate) in enumerate(answer.rows):
        if kind is ProbeKind.COMPUTE:
            side = MATMUL_SIZE_CUDA if device == "cuda" else MATMUL_SIZE_CPU
            against = f"{side} x {side} in TF32, every element exact"
            rows.append(Row(f"{name}, device {number}", 2 * side**3 / seconds / 1e12, "TFLOP/s", against=against))
        else:
            against = f"patterns in {size >> 20} MiB, each word looked at"
            rows.append(Row(f"{name}, device {number}", rate / 1e9, "GB/s", against=against))
    return rows


async def all_reduce(device: str) -> list[Row]:
    """Of two probe processes, each with a GPU of its own under NCCL."""
    import torch

    backend = "nccl" if device == "cuda" and torch.cuda.device_count() > 1 else "gloo"
    nodes = ("n1", "n2")
    probers: list[Prober] = []
    tasks = []
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        for number, node in enumerate(nodes):
            prober = Prober()
            probers.append(prober)
            if backend == "nccl":
                os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # inherited by the process that is started now
            tasks.append(asyncio.create_task(prober.run(_probe(ProbeKind.ALL_REDUCE, nodes, backend), node)))
            while prober.pid is None and not tasks[-1].done():
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(*tasks)
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
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
