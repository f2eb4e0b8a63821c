"""What a training function holds: where it runs, what it must not lose, which step is next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_hooks.data import ElasticSampler
from trainer_hooks.keeper import Keeper
from trainer_hooks.replicate import replicate
from trainer_hooks.rng import seed_step


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands in its generation. ``restores``: a version will be restored for certain."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    generation: int = 0
    device: torch.device = torch.device("cpu")
    restores: bool = False
    mesh: Callable[[], DeviceMesh] | None = None


class Run:
    """One entry of the training function: one rank in one generation.

    Steps are counted from 1; step 0 is the state before any. Not thread-safe: for the training function's thread.
    """

    def __init__(self, place: Place, keeper: Keeper) -> None:
        self._place = place
        self._keeper = keeper
        self._finished = 0

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        """Ranks of this generation on this node."""
        return self._place.local_world_size

    @property
    def generation(self) -> int:
        """The generation's number; 0 without Everstep."""
        return self._place.generation

    @property
    def device(self) -> torch.device:
        return self._place.device

    @property
    def distributed(self) -> bool:
        """Whether there is a process group (of one rank, perhaps)."""
        return self._place.mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """A fresh one-dimensional device mesh over all ranks. Raises RuntimeError without a process group."""
        if self._place.mesh is None:
            raise RuntimeError("there is no process group: look at run.distributed before you ask for run.mesh")
        return self._place.mesh()

    @property
    def finished(self) -> int:
        """The last finished step."""
        return self._finished

    def sampler(self, size: int, *, global_batch: int, seed: int = 0, drop_last: bool = False) -> ElasticSampler:
        """Samples of a data set of ``size`` for this rank; see ElasticSampler."""
        return ElasticSampler(
            size,
            global_batch=global_batch,
            seed=seed,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=drop_last,
        )

    def replicate(self, model: nn.Module, *, exact: bool = True, **options: Any) -> nn.Module:
        """``model`` in DistributedDataParallel; the model itself without a process group.

        ``exact`` adds gradients in the order of ranks, so that a run that lost a rank and found another goes on to the
        last bit as if it had not. ``options`` go to DistributedDataParallel.
        """
        if not self.distributed:
            return model
        return replicate(model, exact=exact, equal_already=self._place.restores, waited=self._keeper.waited, **options)

    def track(self, **objects: object) -> None:
        """Names what must survive, and restores it to the version that the generation agreed upon.

        Takes modules, optimizers and whatever has ``state_dict`` and ``load_state_dict``. Call it once, after all of
        it was built and before ``steps``. From then on the state is kept after every step; an optimizer's ``step``
        waits for the copy to be complete.

        Raises TypeError for an object that cannot be tracked, NotRestorable where the objects are others than those
        that were stored.
        """
        self._finished = self._keeper.track(objects)
        for tracked in objects.values():
            if isinstance(tracked, torch.optim.Optimizer):
                tracked.register_step_pre_hook(lambda *_: self._keeper.before_update())

    def steps(self, until: int, *, seed: int = 0) -> Iterator[int]:
        """The steps still to do, up to and including ``until``. A step is finished when the loop asks for the next.

        Before each one torch, ``random`` and numpy are seeded from (seed, step, rank): dropout does not depend on what
        failed before. Leaving the loop by ``break`` leaves its step unfinished.
        """
        for step in range(self._finished + 1, until + 1):
            seed_step(seed, step, self.rank)
            yield step
            self.step_finished()

    def step_finished(self) -> None:
        """For a loop of one's own instead of ``steps``: the next step is finished, tracked state stands."""
        self._finished += 1
        self._keeper.step_finished(self._finished)

    def report(self, *, loss: torch.Tensor | float) -> None:
        """This rank's loss, for people to watch. A tensor is read later, and never waited for."""
        self._keeper.report(loss)

    def mean(self, value: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """The mean of ``value`` over ranks, each times its ``sampler.weight``: the mean over samples. A collective."""
        total = value.detach().clone() * weight
        if self.distributed:
            dist.all_reduce(total)
            total /= self.world_size
        return total

    def atomic(self) -> AbstractContextManager[None]:
        """A section that no regrouping interrupts, such as the writing of a file. Keep it short."""
        return self._keeper.atomic()
