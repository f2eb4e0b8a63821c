"""Run in exact mode: assign virtual ranks to this rank and combine their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from everstep_trainer.data.loader import iter_batches
from everstep_trainer.data.rng import ALL_REPLICAS, seed_step
from everstep_trainer.data.sampler import Sampler, StepPart
from everstep_trainer.parallel.exact.exact_replicas import VirtualReplicas
from everstep_trainer.parallel.exact.summation import VirtualMean
from everstep_trainer.state.tracked_objects import as_list

_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch that use several elements at a time, and so depend on a rank's part of a parameter."""


class ExactMode:
    """The virtual ranks of one run and generation."""

    def __init__(self, mean: VirtualMean) -> None:
        self.mean = mean
        self._begun = self._given = False
        self._models: list[VirtualReplicas] = []
        self._sharded = False

    def add_model(self, model: nn.Module, *, equal_already: bool) -> None:
        """Add a model; see ``Run.replicate``. A collective."""
        replicas = VirtualReplicas(model, self.mean, equal_already=equal_already)
        if replicas.is_sharded:
            self._sharded = True
            self.mean.interleave_ranks()
        self._models.append(replicas)

    def assigned_ranks(self) -> list[tuple[int, int]]:
        """Return the virtual ranks that this rank plays, each with their total number."""
        return [(rank, self.mean.virtual_ranks) for rank in self.mean.mine]

    def parts(self, sampler: Sampler, step: int, seed: int) -> Iterator[StepPart]:
        """Yield the parts of a step; see ``Run.parts``.

        A pass over shards involves all ranks, so a rank with fewer virtual ranks than another repeats its last one.
        """
        batches = iter_batches(sampler, step)
        self._begun = True
        for model in self._models:
            model.begin_step()
        for rank in self.mean.mine:
            seed_step(seed, step, rank)
            share = sampler.for_rank(rank, self.mean.virtual_ranks)
            part = StepPart(rank, share.indices(step), share.loss_weight(step), next(batches))
            yield part
            for model in self._models:
                model.collect(rank)
        for _ in range(self.mean.passes - len(self.mean.mine) if self._sharded else 0):
            yield StepPart(part.rank, part.indices, part.loss_weight, part.batch, is_repeat=True)
            for model in self._models:
                model.collect(None)
        for model in self._models:
            model.reduce()
        seed_step(seed, step, ALL_REPLICAS)
        self._given = True

    def step_finished(self) -> None:
        """Raise RuntimeError if the step's gradients are not those of its virtual ranks."""
        begun, given = self._begun, self._given
        self._begun = self._given = False
        if given:
            return
        if begun:
            raise RuntimeError("the loop over run.parts was left before its end, so this step had no gradients")
        raise RuntimeError(
            "a model of this run has virtual_ranks, and this step has not taken its parts, so that each rank would "
            "train by itself: compute the step in `for part in run.parts(sampler, step)`"
        )

    def require_elementwise(self, tracked: Iterable[object]) -> None:
        """Raise ValueError for an optimizer whose results depend on how its parameters are sharded."""
        every = [one for some in tracked for one in as_list(some)]
        for optimizer in every if self._sharded else ():
            if not isinstance(optimizer, torch.optim.Optimizer):
                continue
            name = type(optimizer).__name__
            if name in _NOT_ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim"):
                raise ValueError(
                    f"{name} looks at a whole parameter, of which a rank has a part: exact mode under fully_shard "
                    "takes optimizers that go element by element, such as AdamW or SGD"
                )
            for group in optimizer.param_groups:
                if group.get("fused") and any(p.device.type == "cpu" for p in group["params"]):
                    raise ValueError(
                        f"the fused {name} of a CPU rounds a shard's last elements otherwise than others: exact mode "
                        "under fully_shard needs fused=False"
                    )
