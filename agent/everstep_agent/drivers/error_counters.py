"""Read what the kernel counts of memory errors (EDAC) and PCI Express errors (AER), below an injectable root.

Nothing here raises OSError or asks the hardware: the kernel keeps these counters in memory. Facts are from the kernel's
Documentation/admin-guide/ras.rst and Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
"""

from __future__ import annotations

import re
from pathlib import Path

from everstep.host.pci_devices import pci_devices
from everstep_agent.drivers.fabric_services import is_switch
from everstep_agent.drivers.pci_gpus import is_nvidia_gpu
from everstep_agent.drivers.samples import MemoryModuleSample, PciErrorSample
from everstep_agent.drivers.sysfs import entries, read_int, read_text

_CONTROLLER = re.compile(r"mc\d+")
_MODULE = re.compile(r"(dimm|rank)\d+")

NO_LINK_ERRORS = frozenset(("NonFatalErr", "UnsupReq"))
"""Names of errors that no link makes: a program that reads registers a device does not have causes them."""


def memory_modules(root: Path) -> list[MemoryModuleSample]:
    """Return a sample of each memory module, and one of each controller for errors without a known module."""
    samples = []
    for controller in entries(root / "devices/system/edac/mc"):
        if not _CONTROLLER.fullmatch(controller.name):
            continue
        modules = [_module(folder) for folder in entries(controller) if _MODULE.fullmatch(folder.name)]
        counted = [module for module in modules if module.corrected is not None]
        part = "_noinfo" if counted else ""  # before 4.10 the kernel counts by controller only
        samples += counted
        samples.append(
            MemoryModuleSample(
                name=controller.name,
                corrected=read_int(controller / f"ce{part}_count"),
                uncorrected=read_int(controller / f"ue{part}_count"),
            )
        )
    return samples


def _module(folder: Path) -> MemoryModuleSample:
    return MemoryModuleSample(
        name=f"{folder.parent.name}/{folder.name}",
        label=read_text(folder / "dimm_label") or "",
        corrected=read_int(folder / "dimm_ce_count"),
        uncorrected=read_int(folder / "dimm_ue_count"),
    )


def watched_pci_devices(root: Path) -> list[Path]:
    """Return GPUs, NVSwitches and RDMA adapters, each followed by the port above it, at the other end of its link."""
    of_nvidia = [device.folder for device in pci_devices(root) or () if is_nvidia_gpu(device) or is_switch(device)]
    adapters = {(adapter / "device").resolve() for adapter in entries(root / "class/infiniband")}
    devices = {folder.resolve() for folder in of_nvidia} | adapters
    return [end for device in sorted(devices) for end in (device, device.parent)]


def pci_errors(devices: list[Path]) -> list[PciErrorSample]:
    """Return the error counts of those devices that report errors."""
    samples: dict[str, PciErrorSample] = {}
    for device, above in zip(devices[::2], devices[1::2], strict=True):
        for end in (device, above):
            sample = PciErrorSample(
                name=end.name,
                device=device.name,
                corrected=_errors(end / "aer_dev_correctable"),
                nonfatal=_errors(end / "aer_dev_nonfatal"),
                fatal=_errors(end / "aer_dev_fatal"),
            )
            if sample.corrected is not None:
                samples.setdefault(end.name, sample)
    return list(samples.values())


def _errors(path: Path) -> int | None:
    """Return the sum of a file's counts, such as ``BadTLP 3``, without the total and errors that no link makes."""
    text = read_text(path)
    if text is None:
        return None
    counts = (line.split() for line in text.splitlines())
    return sum(
        int(count[1])
        for count in counts
        if len(count) == 2
        and count[1].isdigit()
        and not count[0].startswith("TOTAL_")
        and count[0] not in NO_LINK_ERRORS
    )
