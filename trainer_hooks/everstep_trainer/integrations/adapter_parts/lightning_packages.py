"""Find Lightning's packages, and describe a rank to them: shared by the adapters of its Trainer and of Fabric.

The distribution ``lightning`` holds copies of the packages ``pytorch_lightning`` and ``lightning_fabric``. The classes
of a copy are other classes, and a Trainer or a Fabric refuses those of the other copy. Read in Lightning 2.6.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from everstep_trainer.run import Run

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment

ROOTS = tuple(name for name in ("lightning", "lightning_fabric") if find_spec(name))
"""The installed packages that hold Fabric."""


def installed(*packages: tuple[str, str]) -> tuple[str, ...]:
    """Return the packages that are installed, each given as its root and the rest of its name.

    Raises:
        ModuleNotFoundError: None of them is.
    """
    found = tuple(root + rest for root, rest in packages if find_spec(root))
    if not found:
        raise ModuleNotFoundError(
            "PyTorch Lightning is not installed: pip install lightning, or pip install pytorch-lightning"
        )
    return found


def classes(packages: tuple[str, ...], module: str, name: str) -> tuple[Any, ...]:
    """Return the class of that name in each package."""
    return tuple(getattr(importlib.import_module(package + module), name) for package in packages)


def base(packages: tuple[str, ...], module: str, name: str) -> Any:
    """Return one class derived from the class of that name in each package, so that every copy accepts it."""
    return types.new_class(name, classes(packages, module, name))


def package_in_use(packages: tuple[str, ...]) -> str:
    """Return the one of ``packages`` whose names the calling script uses; the first if there is no sign of any."""
    by_root = {package.partition(".")[0]: package for package in packages}
    if "pytorch_lightning" in by_root:
        by_root["lightning_fabric"] = by_root["pytorch_lightning"]
    frame: types.FrameType | None = sys._getframe(1)
    while len(packages) > 1 and frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("everstep_trainer."):
            for value in chain(frame.f_locals.values(), frame.f_globals.values()):
                name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                if isinstance(name, str) and (root := name.partition(".")[0]) in by_root:
                    return by_root[root]
        frame = frame.f_back
    return packages[0]


if not TYPE_CHECKING:
    _FABRICS = installed(("lightning", ".fabric"), ("lightning_fabric", ""))
    ClusterEnvironment = base(_FABRICS, ".plugins.environments", "ClusterEnvironment")


class EverstepEnvironment(ClusterEnvironment):
    """A Lightning cluster environment that describes this rank; Everstep starts processes and makes process groups."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Unused: Lightning makes no rendezvous here."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the generation determines it."""

    def global_rank(self) -> int:
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the generation determines it."""

    def local_rank(self) -> int:
        return self._run.local_rank

    def node_rank(self) -> int:
        return self._run.rank // self._run.local_world_size


def global_seed() -> int:
    """Return the seed of Lightning's ``seed_everything``; 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class RunStrategyMixin:
    """What the strategies of Trainer and Fabric have in common on a run: its rank, device and process group.

    Lightning's own strategy comes next in the order of bases.
    """

    run: Run
    _owns_group = False

    @property
    def root_device(self) -> torch.device:
        return self.run.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if "data_parallel" not in (mesh_names(self) or ()):
            return {"num_replicas": self.run.world_size, "rank": self.run.rank}
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]  # the strategy's
        return kwargs

    def _configure_launcher(self) -> None:
        """Do nothing: the processes run already."""

    def setup_environment(self) -> None:
        """Use the process group of the generation; make one of a single rank where there is none."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.run.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]  # exported at run time
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._owns_group = True
        super().setup_environment()  # type: ignore[misc]  # the strategy's
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            self.run.data_parallel(mesh["data_parallel"])

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save while other ranks may wait."""
        with self.run.alone("checkpoint"):
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]  # the strategy's

    def release_group(self) -> None:
        """Destroy the process group if it was made here."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False


def mesh_names(strategy: object) -> tuple[str, ...] | None:
    """Return the dimensions of a strategy's device mesh; None without one."""
    mesh = getattr(strategy, "_device_mesh", None)
    return None if mesh is None else mesh.mesh_dim_names


def make_strategy(run: Run, mixin: type, kind: type, options: Mapping[str, Any]) -> Any:
    """Return a strategy of Lightning's class ``kind`` on a run.

    Raises:
        TypeError: The class is FSDPStrategy, whose state cannot be restored.
    """
    if kind.__name__ == "FSDPStrategy":
        raise TypeError(
            "FSDPStrategy shards by FSDP1, whose state cannot be restored: take ModelParallelStrategy, and shard by "
            "fully_shard (FSDP2) in the model"
        )
    arguments = dict(options)
    if kind.__name__ == "ModelParallelStrategy":
        arguments.setdefault("tensor_parallel_size", 1)
        arguments.setdefault("data_parallel_size", run.world_size // arguments["tensor_parallel_size"])
    strategy = types.new_class(f"Everstep{kind.__name__}", (mixin, kind))(**arguments)
    strategy.run = run
    strategy.cluster_environment = EverstepEnvironment(run)
    strategy.parallel_devices = [run.device]
    return strategy
