"""Divide a step into the parts of ranks or virtual ranks, and combine their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from everstep_trainer.data.loader import iter_batches
from everstep_trainer.data.rng import ALL_REPLICAS
from everstep_trainer.data.sampler import Sampler, StepPart
from everstep_trainer.loss_guard import Loss
from everstep_trainer.parallel.exact.mode import ExactMode
from everstep_trainer.parallel.exact.summation import VirtualMean
from everstep_trainer.parallel.gradients import replicate
from everstep_trainer.parallel.replica_groups import RankContext, ReplicaAssignment
from everstep_trainer.runtime.peer_wait import CollectiveTimer
from everstep_trainer.state.untracked_state import ReplicaSync


class StepParallelism:
    """The replica-dependent operations of ``Run``. ``on_wait``: receives the seconds of collectives."""

    def __init__(self, context: RankContext, replicas: ReplicaAssignment, on_wait: Callable[[float], None]) -> None:
        self._context = context
        self._replicas = replicas
        self._on_wait = on_wait
        self._exact: ExactMode | None = None
        self._replica_sync = ReplicaSync()
        self._equal_already = context.will_restore

    def step_finished(self) -> None:
        """End a step; see Run."""
        if self._exact is not None:
            self._exact.step_finished()

    def replicate(self, model: nn.Module, exact: bool, virtual_ranks: int | None, options: dict[str, Any]) -> nn.Module:
        """Replicate a model; see Run."""
        if virtual_ranks is not None:
            return self._replicate_virtually(model, virtual_ranks, exact, options)
        if self._exact is not None:
            raise ValueError("another model of this run has virtual_ranks: give them to all, or to none")
        if self._context.mesh is None:
            return model
        if not self._replicas.set_gradient_group(options):
            return model
        replicas = replicate(model, exact=exact, equal_already=self._equal_already, on_wait=self._on_wait, **options)
        self._replica_sync.add_model(model, replicas.process_group, ignored=replicas.parameters_to_ignore)
        return replicas

    def _replicate_virtually(self, model: nn.Module, count: int, exact: bool, options: dict[str, Any]) -> nn.Module:
        if options or not exact:
            raise TypeError(f"with virtual_ranks there is no DistributedDataParallel: leave out {sorted(options)}")
        self._replicas.replica_for("run.replicate")
        if not self._replicas.has_replica_per_rank:
            raise ValueError(
                "exact mode (virtual_ranks) takes replicas of one rank each, sharded by fully_shard or not, not "
                "tensor parallelism or a pipeline: go on without virtual_ranks"
            )
        if self._exact is None:
            place = self._context
            self._exact = ExactMode(VirtualMean(count, place.rank, place.world_size, CollectiveTimer(self._on_wait)))
        elif (known := self._exact.mean.virtual_ranks) != count:
            raise ValueError(f"another model of this run has {known} virtual ranks, not {count}")
        self._exact.add_model(model, equal_already=self._equal_already)
        if self._context.mesh is not None:
            self._replica_sync.add_model(model)
        return model

    def synchronize_restored(self, objects: Mapping[str, object], exclude: Iterable[str]) -> None:
        """Make replicas equal in state that the restored version does not contain, after a restore."""
        if self._equal_already:
            self._replica_sync.broadcast(objects, exclude)
        self._equal_already = False

    def require_elementwise(self, tracked: Iterable[object]) -> None:
        """Raise ValueError if exact mode does not allow a tracked optimizer."""
        if self._exact is not None:
            self._exact.require_elementwise(tracked)

    def assigned_ranks(self) -> list[tuple[int, int]]:
        """Return the replicas whose parts this rank computes, each with their total number."""
        if self._exact is not None:
            return self._exact.assigned_ranks()
        replica = self._replicas.replica_for("run.loader")
        return [(replica.index, replica.count)]

    def rng_stream(self) -> tuple[int, int]:
        """Return the (replica, stage) of the random numbers that a step begins with; one for all ranks with virtual
        ranks."""
        replica = self._replicas.replica_for("run.steps")
        return (replica.index, replica.stage) if self._exact is None else (ALL_REPLICAS, 0)

    def parts(self, sampler: Sampler, step: int, seed: int) -> Iterator[StepPart]:
        """Yield the parts of a step; see Run."""
        if self._exact is not None:
            yield from self._exact.parts(sampler, step, seed)
            return
        batches = iter_batches(sampler, step)
        replica = self._replicas.replica_for("run.parts")
        yield StepPart(replica.index, sampler.indices(step), sampler.loss_weight(step), next(batches))

    def mean(self, value: Loss | None, weight: float) -> torch.Tensor:
        """Return the mean over replicas; see Run."""
        if value is not None and not isinstance(value, torch.Tensor):
            if self._exact is not None:
                return self._exact.mean.mean_of_scalars([each * weight for each in value])
            (value,) = value
        return self._replicas.mean(value, weight)
