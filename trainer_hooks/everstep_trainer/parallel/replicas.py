"""Determine which replica of the model a rank belongs to; the ranks of a replica share samples and random numbers.

Under DDP, FSDP2 and HSDP every rank is a replica. Under tensor parallelism and in a pipeline, several ranks compute
one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.data.loader import iter_batches
from everstep_trainer.data.rng import ALL_REPLICAS
from everstep_trainer.data.sampler import Sampler, StepPart
from everstep_trainer.memory_tier.tier import MemoryTier
from everstep_trainer.parallel.exact.summation import VirtualMean
from everstep_trainer.parallel.exact.virtual_ranks import ExactMode
from everstep_trainer.parallel.exchange import Exchange
from everstep_trainer.parallel.lane import all_gather, make_lane
from everstep_trainer.parallel.ordered_gradients import add_in_rank_order, exchanges_of, replicate
from everstep_trainer.parallel.wait_report import WaitReport
from everstep_trainer.state.tracked_objects import as_list
from everstep_trainer.state.untracked_state import ReplicaSync

Loss = torch.Tensor | Sequence[torch.Tensor]
"""A replica's mean loss, or in exact mode one for each virtual rank."""

# ---- place of a rank in its generation


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a rank in its generation.

    ``will_restore``: a version will be restored for certain. ``is_elastic``: generations may differ in world size.
    ``job``: its name, empty without Everstep.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    generation: int = 0
    device: torch.device = torch.device("cpu")
    will_restore: bool = False
    is_elastic: bool = False
    job: str = ""
    mesh: Callable[[], DeviceMesh] | None = None
    tier: Callable[[], MemoryTier] | None = None


MAX_SHOWN = 8  # most replicas named in an error: there may be thousands


class Replica(msgspec.Struct, frozen=True):
    """Replica ``index`` of ``count``, counted from 0; ``stage``: this rank's pipeline stage in it."""

    index: int
    count: int
    stage: int = 0


class ReplicaAssignment:
    """The replica of a rank: itself, unless declared otherwise. ``device``: for collectives; None without a group."""

    def __init__(self, rank: int, world_size: int, device: torch.device | None) -> None:
        self._world = world_size
        self._device = device
        self._replica = Replica(rank, world_size)
        self._mesh: DeviceMesh | None = None
        self._used_for = ""
        self.is_declared = False

    def declare(self, replicas: DeviceMesh | tuple[int, int], stage: DeviceMesh | int) -> Replica:
        """Declare the replica; see ``Run.data_parallel``. A collective."""
        if self.is_declared:
            raise ValueError("run.data_parallel was called twice in this generation: call it once")
        if self._used_for:
            raise ValueError(
                f"{self._used_for} was already called assuming one replica per rank: call run.data_parallel before "
                "it, as soon as the mesh is made"
            )
        index, count = _replica_index(replicas)
        replica = Replica(index, count, _replica_index(stage)[0] if isinstance(stage, DeviceMesh) else stage)
        declared = torch.tensor([[index, count]], device=self._device)
        if self._device is not None:
            own, declared = declared, declared.new_empty(self._world, 2)
            all_gather(declared, own)
        _require_whole_replicas(declared.tolist(), self._world)
        self._replica, self.is_declared = replica, True
        self._mesh = replicas if isinstance(replicas, DeviceMesh) else None
        return replica

    def replica_for(self, use: str) -> Replica:
        """Return the replica for ``use``; it cannot be declared any more afterwards."""
        self._used_for = self._used_for or use
        return self._replica

    @property
    def has_replica_per_rank(self) -> bool:
        """True if every rank is a replica of its own."""
        return self._replica.count == self._world

    def set_gradient_group(self, options: dict[str, Any]) -> bool:
        """Set the process group in DistributedDataParallel's options; return False if there is one replica and no
        group. Raises ValueError if no group is known and there are several replicas."""
        replica = self.replica_for("run.replicate")
        if self.has_replica_per_rank or "process_group" in options:
            return True
        if self._mesh is not None and self._mesh.ndim == 1:
            options["process_group"] = self._mesh.get_group()
            return True
        if replica.count == 1:
            return False
        raise ValueError(
            "run.replicate does not know over which ranks to add gradients: give run.data_parallel a mesh of one "
            'dimension, such as mesh["dp"], or run.replicate a process_group'
        )

    def mean(self, value: torch.Tensor | None, weight: float) -> torch.Tensor:
        """Return the mean over replicas; see ``Run.mean``. A collective."""
        self.replica_for("run.mean")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not self.has_replica_per_rank:
            return self._mean_over_replicas(value, weight)
        if value is None:
            raise ValueError(
                "this rank passed no loss but counts as its own replica: in a pipeline, declare the replicas with "
                "run.data_parallel"
            )
        total = value.detach().clone() * weight
        if self._device is not None:
            dist.all_reduce(total)
            total /= self._world
        return total

    def _mean_over_replicas(self, value: torch.Tensor | None, weight: float) -> torch.Tensor:
        """Return the mean over ranks with a value, which is that over replicas if each has equally many such ranks."""
        known = torch.zeros((), device=self._device) if value is None else value.detach()
        weighted: torch.Tensor = known * weight
        have = weighted.new_zeros(self._replica.count, dtype=torch.float64)
        have[self._replica.index] = value is not None
        sums = torch.cat([weighted.double().reshape(-1), have])
        dist.all_reduce(sums)
        counts: list[float] = sums[-self._replica.count :].tolist()
        if counts[0] == 0 or len(set(counts)) > 1:
            found = ", ".join(f"{ranks:.0f} of number {index}" for index, ranks in [*enumerate(counts)][:MAX_SHOWN])
            raise ValueError(
                f"the {self._replica.count} replicas differ in how many of their ranks have a loss, or none has one: "
                f"{found}. Pass it to run.mean on the same ranks of each, such as a pipeline's last stage, and None on "
                "all others"
            )
        return (sums[: weighted.numel()] / sum(counts)).to(weighted.dtype).reshape(weighted.shape)


def _replica_index(replicas: DeviceMesh | tuple[int, int]) -> tuple[int, int]:
    """Return this rank's place and the number of places; in a mesh of several dimensions, in the order of its ranks."""
    if not isinstance(replicas, DeviceMesh):
        index, count = replicas
        return index, count
    coordinate = replicas.get_coordinate()
    if coordinate is None or int(replicas.mesh[tuple(coordinate)]) != dist.get_rank():
        raise ValueError(
            f"rank {dist.get_rank()} is not on the mesh {replicas}: make new meshes in each generation, inside the "
            "training function, and take the dimensions of the replicas from a mesh over all ranks (mesh['dp'])"
        )
    index = 0
    for place, size in zip(coordinate, replicas.shape, strict=True):
        index = index * size + place
    return index, replicas.size()


def _require_whole_replicas(declared: list[list[int]], world_size: int) -> None:
    """Raise ValueError unless all (index, count) have one count, and replicas have equally many ranks."""
    counts = sorted({count for _, count in declared})
    if len(counts) > 1:
        raise ValueError(f"ranks declare different numbers of replicas: {counts}")
    (count,) = counts
    ranks_of = Counter(index for index, _ in declared)
    each = world_size // count if count > 0 else 0
    if each * count == world_size and all(ranks_of[index] == each for index in range(count)):
        return
    found = ", ".join(f"{ranks} of number {index}" for index, ranks in sorted(ranks_of.items())[:MAX_SHOWN])
    raise ValueError(
        f"{world_size} ranks cannot form {count} replicas of equally many ranks, counted from 0: found {found}. "
        "Give run.data_parallel the mesh of the replicas, such as mesh['dp'], or (index, count)"
    )


# ---- detection of undeclared model parallelism

log = logging.getLogger(__name__)


def warn_of_model_parallelism(tracked: Iterable[object], world_size: int) -> None:
    """Log a warning if no replicas are declared and one seems to span several ranks."""
    if sign := find_model_parallelism(tracked, world_size):
        log.warning(
            "%s, but run.data_parallel was not called: each of %d ranks has its own samples and random numbers. "
            'Declare the replicas with run.data_parallel(mesh["dp"]), or one replica per rank with '
            "run.data_parallel((run.rank, run.world_size))",
            sign,
            world_size,
        )


def find_model_parallelism(tracked: Iterable[object], world_size: int) -> str:
    """Return a sign of model parallelism in the tracked modules, or an empty string; pipelines may show none."""
    modules = (module for item in tracked for module in as_list(item) if isinstance(module, nn.Module))
    signs = (sign for module in modules for sign in _find_in_module(module, "", False, world_size))
    return next(signs, "")


def _find_in_module(module: nn.Module, name: str, sharded: bool, world_size: int) -> Iterator[str]:
    """Yield signs in a module; ``sharded``: an outer module is sharded by fully_shard, which is data parallelism."""
    if isinstance(module, DistributedDataParallel) and (size := dist.get_world_size(module.process_group)) < world_size:
        yield f"a model is replicated over {size} of {world_size} ranks"
    sharded = sharded or isinstance(module, FSDPModule)
    parameters: Mapping[str, torch.Tensor | None] = module._parameters
    for key, parameter in parameters.items():
        if isinstance(parameter, DTensor) and (how := _describe_split(parameter, sharded, world_size)):
            yield f"{name}{key} {how}"
    for key, part in module.named_children():
        yield from _find_in_module(part, f"{name}{key}.", sharded, world_size)


def _describe_split(parameter: DTensor, sharded: bool, world_size: int) -> str:
    mesh, placements = parameter.device_mesh, parameter.placements
    hybrid = len(placements) > 1 and isinstance(placements[0], Replicate)
    of_data = (2 if hybrid else 1) if sharded else 0  # fully_shard's dimensions come first
    for dim in range(of_data, mesh.ndim):
        if mesh.size(dim) > 1 and not isinstance(placements[dim], Replicate):
            return f"is split over {mesh.size(dim)} ranks"
    return f"is sharded over {mesh.size()} of {world_size} ranks" if sharded and mesh.size() < world_size else ""


# ---- parts of a step: of ranks or of virtual ranks, and their combined gradients


class StepParallelism:
    """The replica-dependent operations of ``Run``, documented there. ``on_wait`` receives seconds of collectives."""

    def __init__(self, context: RankContext, replicas: ReplicaAssignment, on_wait: Callable[[float], None]) -> None:
        self._context, self._replicas = context, replicas
        self._waits = waits = WaitReport()

        def count_wait(seconds: float) -> None:  # DDP keeps it, where no cycle of references is found: so not ``self``
            waits.add(seconds)
            on_wait(seconds)

        self._on_wait = count_wait
        self._exact: ExactMode | None = None
        self._replica_sync = ReplicaSync()
        self._equal_already = context.will_restore
        self.ddp_wrappers: list[nn.Module] = []
        """The wrappers that ``replicate`` made."""
        self._exchanges: list[Exchange] = []

    def close(self) -> None:
        """End the exchanges of gradients, also one that waits for a rank that is gone."""
        for exchange in self._exchanges:
            exchange.close()
        if self._exact is not None:
            self._exact.close()

    def step_finished(self) -> None:
        if self._exact is not None:
            self._exact.step_finished()
        if self._context.rank == 0 and self._exchanges:
            self._waits.step_finished()

    def replicate(self, model: nn.Module, exact: bool, virtual_ranks: int | None, options: dict[str, Any]) -> nn.Module:
        if virtual_ranks is not None:
            return self._replicate_virtually(model, virtual_ranks, exact, options)
        if self._exact is not None:
            raise ValueError("another model of this run has virtual_ranks: give them to all, or to none")
        if self._context.mesh is None or not self._replicas.set_gradient_group(options):
            return model
        replicas = replicate(model, exact=exact, equal_already=self._equal_already, on_wait=self._on_wait, **options)
        self._exchanges += exchanges_of(replicas)
        self._replica_sync.add_model(model, replicas.process_group, ignored=replicas.parameters_to_ignore)
        self.ddp_wrappers.append(replicas)
        return replicas

    def make_exact(self, model: nn.Module) -> None:
        """See ``Run.exact_gradients``."""
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and not module._comm_hooks:
                add_in_rank_order(module, self._on_wait)
                self._exchanges += exchanges_of(module)

    def _replicate_virtually(self, model: nn.Module, count: int, exact: bool, options: dict[str, Any]) -> nn.Module:
        if options or not exact:
            raise TypeError(f"with virtual_ranks there is no DistributedDataParallel: leave out {sorted(options)}")
        self._replicas.replica_for("run.replicate")
        if not self._replicas.has_replica_per_rank:
            raise ValueError(
                "exact mode (virtual_ranks) supports replicas of one rank each, sharded by fully_shard or not, but no "
                "tensor parallelism or pipeline: go on without virtual_ranks"
            )
        if self._exact is None:
            place = self._context
            timer = CollectiveTimer(self._on_wait)
            lane = None if place.world_size == 1 else make_lane(None, place.device, timer, own_stream=False)
            self._exact = ExactMode(VirtualMean(count, place.rank, place.world_size, timer, lane))
        elif (known := self._exact.mean.virtual_ranks) != count:
            raise ValueError(f"another model of this run has {known} virtual ranks, not {count}")
        self._exact.add_model(model, equal_already=self._equal_already)
        if self._context.mesh is not None:
            self._replica_sync.add_model(model)
        return model

    def synchronize_restored(
        self, objects: Mapping[str, object], exclude: Iterable[str], running: Collection[str] = ()
    ) -> None:
        """Make replicas equal in state that the restored version does not contain, after a restore.

        ``running``: Names of restored buffers that are not persistent.
        """
        if self._equal_already:
            self._replica_sync.broadcast(objects, exclude, running)
        self._equal_already = False

    def require_elementwise(self, tracked: Iterable[object]) -> None:
        """Raise ValueError if exact mode does not allow a tracked optimizer."""
        if self._exact is not None:
            self._exact.require_elementwise(tracked)

    def assigned_ranks(self) -> list[tuple[int, int]]:
        """Return the replicas whose parts this rank computes, each with their total number."""
        if self._exact is not None:
            return [(rank, self._exact.mean.virtual_ranks) for rank in self._exact.mean.mine]
        replica = self._replicas.replica_for("run.loader")
        return [(replica.index, replica.count)]

    def rng_stream(self) -> tuple[int, int]:
        """Return the (replica, stage) of the random numbers that a step begins with; virtual ranks share one stream."""
        replica = self._replicas.replica_for("run.steps")
        return (replica.index, replica.stage) if self._exact is None else (ALL_REPLICAS, 0)

    def parts(self, sampler: Sampler, step: int, seed: int) -> Iterator[StepPart]:
        if self._exact is not None:
            yield from self._exact.parts(sampler, step, seed)
            return
        batches = iter_batches(sampler, step)
        replica = self._replicas.replica_for("run.parts")
        yield StepPart(replica.index, sampler.indices(step), sampler.loss_weight(step), next(batches))

    def mean(self, value: Loss | None, weight: float) -> torch.Tensor:
        if value is not None and not isinstance(value, torch.Tensor):
            if self._exact is not None:
                return self._exact.mean.mean_of_scalars([each * weight for each in value])
            (value,) = value
        return self._replicas.mean(value, weight)
