"""Check torch, by a child process that imports it, and the GPUs' driver, by NVML."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from everstep.doctor.results import CheckResult, fail, ok, warn
from everstep.errors import DECODE_ERRORS

OLDEST_TORCH = (2, 13)
TORCH_TIMEOUT_S = 120.0
"""Longest import of torch; from a cold network file system it takes a minute."""
_NVML_LIBRARY = "libnvidia-ml.so.1"
_VERSION_BYTES = 80


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process found out about torch.

    ``error``: why torch cannot be used at all. ``device_error``: why its CUDA devices cannot. ``uses_nccl2``: the name
    "nccl" stands for torch's newer NCCL backend.
    """

    version: str = ""
    cuda: str = ""
    hip: str = ""
    devices: int = 0
    device_error: str = ""
    has_gloo: bool = False
    has_nccl: bool = False
    uses_nccl2: bool = False
    error: str = ""


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says. ``device_files``: the kernel module has made files of GPUs. ``error``: why NVML does not work."""

    device_files: int = 0
    devices: int = 0
    driver: str = ""
    error: str = ""


def read_torch(timeout_s: float = TORCH_TIMEOUT_S) -> TorchFacts:
    """Return the facts about torch, from a child process."""
    if importlib.util.find_spec("torch") is None:
        return TorchFacts(error="torch is not installed in this environment (pip install 'everstep[trainer]')")
    command = [sys.executable, "-P", "-m", "everstep_trainer.base.torch_facts"]
    try:
        environment = {"TORCH_DIST_USE_NCCL2": "0", **os.environ}  # as everstep-launch sets it for ranks
        ended = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"torch was not imported within {timeout_s:g} s")
    try:
        return msgspec.json.decode(ended.stdout.strip().rpartition(b"\n")[2], type=TorchFacts)
    except DECODE_ERRORS:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return TorchFacts(error=f"importing it ended with status {ended.returncode}: {last}")


def read_driver(devices: Path = Path("/dev")) -> DriverFacts:
    """Return what NVML says about this machine's GPUs."""
    files = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in devices.iterdir())
    try:
        nvml = ctypes.CDLL(_NVML_LIBRARY)
        if number := nvml.nvmlInit_v2():
            return DriverFacts(device_files=files, error=f"NVML answers with error {number}")
    except (OSError, AttributeError) as error:
        return DriverFacts(device_files=files, error=f"{_NVML_LIBRARY} cannot be loaded: {error}")
    try:
        count, driver = ctypes.c_uint(), ctypes.create_string_buffer(_VERSION_BYTES)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlSystemGetDriverVersion(driver, _VERSION_BYTES)
    finally:
        nvml.nvmlShutdown()
    return DriverFacts(device_files=files, devices=count.value, driver=driver.value.decode(errors="replace"))


def check_driver(driver: DriverFacts) -> Iterator[CheckResult]:
    """Check NVML, which sensors of an agent need on a machine with GPUs."""
    if driver.devices:
        yield ok("GPU driver", f"{driver.devices} GPUs, driver {driver.driver}")
    elif driver.device_files:
        yield fail(
            "GPU driver",
            f"/dev has {driver.device_files} GPUs, but {driver.error or 'NVML finds none'}: install the driver's "
            "libraries of the same version, and in a container run with --gpus all",
        )
    else:
        yield ok("GPU driver", "no NVIDIA GPU: ranks train on the CPU")


def check_other_gpus(gpus: Mapping[str, int]) -> Iterator[CheckResult]:
    """Warn of the GPUs by vendor that no agent watches."""
    for vendor, count in gpus.items():
        if not count:
            continue
        sentence = f"GPUs of {vendor} are not watched: this machine has {count}, whose faults are not reported"
        yield warn(f"GPUs of {vendor}", sentence)


def check_torch(torch: TorchFacts, driver: DriverFacts) -> Iterator[CheckResult]:
    """Check that torch is new enough and fits the machine's GPUs."""
    if torch.error:
        yield fail("torch", f"{torch.error}: try `python -c 'import torch'`")
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "for CPUs"
    name = f"torch {torch.version}, {build}"
    numbers = re.findall(r"\d+", torch.version)[:2]
    if tuple(map(int, numbers)) < OLDEST_TORCH:
        yield fail("torch", f"{name}: too old; install {'.'.join(map(str, OLDEST_TORCH))} or later")
    elif driver.devices and not (torch.cuda or torch.hip):
        yield fail("torch", f"{name}, but this machine has {driver.devices} GPUs: install a build with CUDA")
    elif torch.device_error and driver.devices:
        yield fail("torch", f"{name}, cannot use the GPUs: {torch.device_error}. Check that the driver is new enough")
    elif driver.devices and torch.devices < driver.devices:
        yield warn("torch", f"{name}, sees {torch.devices} of {driver.devices} GPUs: check CUDA_VISIBLE_DEVICES")
    else:
        yield ok("torch", name)
    if not torch.has_gloo:
        yield fail("gloo", "this torch was built without gloo, over which ranks meet: install another build")
    elif driver.devices and not torch.has_nccl:
        yield fail("NCCL", "this torch was built without NCCL: install a build with CUDA")
    elif driver.devices and torch.uses_nccl2:
        yield warn("NCCL", "torch uses nccl2, which Everstep was not tested with: set TORCH_DIST_USE_NCCL2=0")
