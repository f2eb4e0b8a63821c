"""Let torchtitan's Trainer run on a machine without a GPU, for trials and tests.

torchtitan 0.3 supports accelerators only, and four of its parts stop a run on CPUs. This module replaces them:

* At its import torchtitan loads Triton kernels for expert parallelism. CPU builds of torch come without Triton. So a
  module without kernels takes their place, and calling one raises an error.
* Its utilities name ``cuda`` as the device if there is none. They name ``cpu`` instead.
* Its language models use FlexAttention, which has no backward pass on CPUs. Causal attention takes its place, which
  also sees earlier documents of the same packed sequence: losses on a CPU are not those on a GPU.
* FSDP2 scales gradients inside the reduction, which gloo cannot. It adds them without a factor.

Import it before torchtitan's models; ``everstep_trainer.integrations.torchtitan`` does.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"  # of torchtitan 0.3; all that it imports Triton for


class _AbsentKernels(ModuleType):
    """Takes the place of the Triton kernels; each function raises ModuleNotFoundError when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*arguments: object, **options: object) -> None:
            raise ModuleNotFoundError(f"{self.__name__}.{name} needs Triton: pip install triton")

        return absent


if find_spec("triton") is None:
    sys.modules.setdefault(KERNELS, _AbsentKernels(KERNELS))

from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention  # noqa: E402
from torchtitan.tools import utils  # noqa: E402


class _CPUDevice:
    """The part of ``torch.cuda`` that torchtitan calls, for a CPU; the rest is that of ``torch.cpu``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Do nothing: torch does not count a CPU's allocations."""

    def empty_cache(self) -> None:
        """Do nothing: torch keeps no cache of a CPU's memory."""


def use_cpu(config: Any) -> None:
    """Make torchtitan use CPUs, also in its modules that are loaded already, and change the model's attention.

    Args:
        config: A ``Trainer.Config``; its attention is replaced where FlexAttention or varlen attention is set.
    """
    if utils.device_type != "cpu":
        former, device = utils.device_module, _CPUDevice()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "torchtitan":
                continue
            if getattr(module, "device_module", None) is former:
                module.device_module = device  # type: ignore[attr-defined]
            if isinstance(getattr(module, "device_type", None), str):
                module.device_type = "cpu"  # type: ignore[attr-defined]
    replaced = False
    for kind in (FlexAttention, VarlenAttention):
        for _, _, parent, key in [*config.model_spec.model.traverse(kind.Config)]:
            if isinstance(parent, list):
                parent[key] = ScaledDotProductAttention.Config()
            else:
                setattr(parent, key, ScaledDotProductAttention.Config())
            replaced = True
    if replaced:
        log.warning("attention on a CPU is causal and sees earlier documents of a packed sequence")


def reduce_without_factor(model: nn.Module) -> None:
    """Make FSDP2 add gradients without scaling them in the reduction, for gloo; torchtitan's factor is one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
