"""Describe what decides the bits that a rank computes: its processor, its driver and its libraries.

Two ranks of different kinds may both be right and differ in their last bits, so no audit compares their bits.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
MAX_KIND_CHARS = 256


@cache
def compute_kind(device: torch.device) -> str:
    """Return the kind of a rank, equal for ranks whose results must be equal bit for bit.

    Args:
        device: The rank's device.

    Returns:
        For example ``NVIDIA H100 80GB HBM3, driver 12080, torch 2.13.0+cu128, CUDA 12.8, cuDNN 91002``.
    """
    parts = _gpu(device) if device.type == "cuda" else _cpu()
    return ", ".join(part for part in parts if part)[:MAX_KIND_CHARS]


def _gpu(device: torch.device) -> list[str]:
    return [
        torch.cuda.get_device_name(device),
        f"driver {torch._C._cuda_getDriverVersion()}",  # type: ignore[attr-defined]  # only in builds for CUDA
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"cuDNN {torch.backends.cudnn.version()}",  # type: ignore[no-untyped-call]
    ]


def _cpu() -> list[str]:
    return [
        _cpu_model(),
        torch.backends.cpu.get_cpu_capability(),
        f"torch {torch.__version__}",
        _math_library(),
    ]


def _cpu_model() -> str:
    """Return the processor's model name, or the architecture where the kernel names no model."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def _math_library() -> str:
    """Return the library that multiplies matrices on the CPU, with its version where torch tells it."""
    found = re.search(r"Math Kernel Library Version (\S+)|OpenBLAS (\S+)", torch.__config__.show())
    return found.group(0) if found else ""
