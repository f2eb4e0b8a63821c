"""What a training function holds: where it runs, what it must not lose, which step is next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from everstep_trainer.data.loader import Loader, PerRankLoader, is_stateful_loader, is_stream
from everstep_trainer.data.rng import seed_step
from everstep_trainer.data.sampler import ElasticSampler, Sampler, StepPart
from everstep_trainer.data.stream import StreamSampler
from everstep_trainer.loss_guard import GuardPolicy, Loss, LossGuard, SpikeRule
from everstep_trainer.memory_tier.tier import MemoryTier
from everstep_trainer.parallel.exact.summation import clip_grad_norm_fixed_order
from everstep_trainer.parallel.replica_groups import RankContext, Replica, ReplicaAssignment, warn_of_model_parallelism
from everstep_trainer.parallel.step_parts import StepParallelism
from everstep_trainer.runtime.generation_session import TrainingSession
from everstep_trainer.runtime.peer_wait import CollectiveTimer
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.tracked_objects import as_list
from everstep_trainer.state.untracked_state import check_untracked

# ---- updates
# What is asked before tracked optimizers update, for as long as one run lasts.

log = logging.getLogger(__name__)

STEPS_UNTIL_STATE_CHECK = 2
"""Steps after which every optimizer has the state that it will have."""
ACCUMULATION_CHECK_STEPS = 32
"""Steps of a generation in which it is counted how many had no update."""


class OptimizerHooks:
    """Calls ``before_update`` before each step of optimizers, until ``close``: one that outlives a generation is asked
    for by the next one's. ``log_fields``: fields for the log."""

    def __init__(self, before_update: Callable[[], None], log_fields: Mapping[str, object]) -> None:
        self._before_update = before_update
        self._log_fields = dict(log_fields)
        self._hooks: list[RemovableHandle] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._updated = False
        self._steps = self._steps_without_update = 0

    def watch(self, objects: Mapping[str, object]) -> None:
        """The optimizers among tracked objects, listed ones too.

        Of models that outlived a generation the gradients go: a new process has none of the step that was interrupted.
        """
        for key, tracked in objects.items():
            for one in as_list(tracked):
                if isinstance(one, torch.optim.Optimizer):
                    one.zero_grad()
                    self._optimizers.append(one)
                    self._hooks.append(one.register_step_pre_hook(self._before(key)))

    def step_finished(self) -> None:
        """Warns, once, of gradients that are added up over steps of the run: no version has them.

        Updates that a loss scaler or a guard leaves out are few, and no reason.
        """
        self._steps += 1
        updated, self._updated = self._updated, False
        if self._steps > ACCUMULATION_CHECK_STEPS or not self._optimizers:
            return
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        if not updated and any(parameter.grad is not None for parameter in trained):
            self._steps_without_update += 1
        if self._steps == ACCUMULATION_CHECK_STEPS and 2 * self._steps_without_update >= self._steps:
            log.warning(
                "in %d of %d steps there were gradients and no update by a tracked optimizer: gradients that are added "
                "up over several steps are not stored, and are lost with any rank. Let each step of the run end with "
                "an update: split its samples into micro-batches inside it",
                self._steps_without_update,
                self._steps,
                extra=self._log_fields,
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, key: str) -> Callable[..., None]:
        steps = count()

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._before_update()
            self._updated = True
            if next(steps) == STEPS_UNTIL_STATE_CHECK and not optimizer.state and optimizer.state_dict().get("state"):
                log.warning(
                    "%s, a %s, has no state where torch's optimizers have it, so the state that its state_dict() gives "
                    "is not stored: track the optimizer inside it, or use another one",
                    key,
                    type(optimizer).__qualname__,
                    extra=self._log_fields,
                )

        outside: Callable[..., None] = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        return outside  # what it counts is no part of a compiled step


class Run:
    """One entry of the training function: one rank in one generation.

    Steps are counted from 1; step 0 is the state before any. Not thread-safe: for the training function's thread.
    """

    def __init__(self, context: RankContext, session: TrainingSession) -> None:
        self._context = context
        self._session = session
        self._finished_step = 0
        self._has_tracked = context.generation == 0  # without Everstep nothing is to be kept
        self._seed = 0
        self._replicas = ReplicaAssignment(
            context.rank, context.world_size, context.device if self.distributed else None
        )
        self._parallelism = StepParallelism(context, self._replicas, session.record_wait)
        self._loaders: list[Loader | PerRankLoader] = []
        self._tier: MemoryTier | None = None
        self._guard: LossGuard | None = None
        self._updates = OptimizerHooks(session.before_update, {"generation": context.generation, "rank": context.rank})

    @property
    def rank(self) -> int:
        return self._context.rank

    @property
    def world_size(self) -> int:
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        """Ranks of this generation on this node."""
        return self._context.local_world_size

    @property
    def generation(self) -> int:
        """The generation's number; 0 without Everstep."""
        return self._context.generation

    @property
    def device(self) -> torch.device:
        return self._context.device

    @property
    def distributed(self) -> bool:
        """Whether there is a process group (of one rank, perhaps)."""
        return self._context.mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """A fresh one-dimensional device mesh over all ranks. Raises RuntimeError without a process group."""
        if self._context.mesh is None:
            raise RuntimeError("there is no process group: look at run.distributed before you ask for run.mesh")
        return self._context.mesh()

    @property
    def tier(self) -> MemoryTier:
        """This rank's place in the memory tier, for ``memory_tier.dcp``. Raises RuntimeError without Everstep."""
        if self._tier is None:
            if self._context.tier is None:
                raise RuntimeError("there is no memory tier: start the program with everstep-launch")
            self._tier = self._context.tier()
        return self._tier

    @property
    def last_finished_step(self) -> int:
        """The last finished step."""
        return self._finished_step

    def data_parallel(self, replicas: DeviceMesh | tuple[int, int], *, stage: DeviceMesh | int = 0) -> Replica:
        """Says which replica of the model this rank belongs to, where that takes several ranks. A collective.

        ::

            mesh = init_device_mesh(run.device.type, (run.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
            run.data_parallel(mesh["dp"])

        From then on ranks of one replica have the same samples and the same random numbers, and its loss counts once.
        Under DDP, FSDP2 and HSDP alone every rank is a replica: there is nothing to say. Say it as soon as the mesh is
        made, in each generation: before ``sampler``, ``loader``, ``replicate``, ``track`` and ``steps``.

        ``replicas``: the part of this generation's mesh that holds one rank of each replica, all dimensions of it
        (``mesh["replicate", "shard"]``); or (index, count), with (0, 1) where all ranks are one replica. ``stage``: in
        a pipeline, which stage this rank has, or that part of the mesh (``mesh["pp"]``): stages have random numbers of
        their own, or the same places would be dropped in all of them.

        Raises ValueError where ranks differ, or replicas would not be of equally many ranks; for a mesh of another
        generation; and after something went by one replica a rank.
        """
        return self._replicas.declare(replicas, stage)

    def sampler(self, size: int, *, global_batch: int, seed: int = 0, drop_last: bool = False) -> ElasticSampler:
        """Samples of a data set of ``size`` for this rank's replica; see ElasticSampler."""
        replica = self._replicas.replica_for("run.sampler")
        return ElasticSampler(
            size,
            global_batch=global_batch,
            seed=seed,
            rank=replica.index,
            world_size=replica.count,
            drop_last=drop_last,
        )

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int = 0,
        drop_last: bool = False,
        fetch_together: bool = False,
        **options: Any,
    ) -> Loader:
        """A DataLoader whose batches are asked for by step: ``loader.batch(step)``, or ``parts(loader, step)``.

        Map-style data are shuffled as by ``sampler``. Iterable data come in their own order, each replica its share of
        every global batch; give the data set ``seek(position)`` (see everstep_trainer.data.stream), or each rank reads
        what the others need as well, and after a restore everything that came before. Whoever reads has to be given the
        whole sequence: worker processes are hidden from the data set, and it must not split itself by rank either.
        ``options`` go to DataLoader: num_workers, prefetch_factor, collate_fn and so on.

        What a data set draws at random for a sample depends on (seed, step, its place in the global batch) only, what
        a collate function draws on (seed, step, the place of its first sample): on the number of replicas, then,
        unless there are virtual ranks. So a data set with ``__getitems__`` is asked for one sample at a time.
        ``fetch_together`` asks it for all that this rank needs at once, and what it draws is as for a collate function.
        Iterable data without ``seek`` draw from one stream an epoch, (seed, epoch), so all readers shuffle them alike.

        Raises TypeError for options that are not the user's to choose here, and for fetch_together with data that have
        no ``__getitems__``; ValueError where a batch cannot be taken from the data or split over the ranks.
        """
        sampler: ElasticSampler | StreamSampler
        if is_stream(dataset):
            if drop_last:
                raise TypeError("drop_last has no meaning for iterable data: their length is not known")
            replica = self._replicas.replica_for("run.loader")
            sampler = StreamSampler(global_batch=global_batch, rank=replica.index, world_size=replica.count)
        else:
            sampler = self.sampler(len(dataset), global_batch=global_batch, seed=seed, drop_last=drop_last)
        made = Loader(dataset, sampler, self._parallelism.assigned_ranks, seed, options, fetch_together=fetch_together)
        self._loaders.append(made)
        return made

    def replicate(
        self, model: nn.Module, *, exact: bool = True, virtual_ranks: int | None = None, **options: Any
    ) -> nn.Module:
        """``model`` in DistributedDataParallel, on one rank too; the model itself without a process group.

        ``exact`` adds gradients in the order of ranks, so that a run that lost a rank and found another goes on to the
        last bit as if it had not. ``options`` go to DistributedDataParallel.

        ``virtual_ranks`` makes the numbers those of so many ranks, to the last bit, whatever the world size is (exact
        mode: docs/how-to/exact-mode.md). It must not change in the life of a run. The model itself is returned, and its
        gradients are made by ``parts``. Takes a model that ``fully_shard`` has sharded over all ranks, too. Raises
        ValueError or TypeError for what cannot be exact, by its name.
        """
        return self._parallelism.replicate(model, exact, virtual_ranks, options)

    def parts(self, sampler: Sampler, step: int) -> Iterator[StepPart]:
        """What this rank computes of ``step``: of each part do a forward and a backward pass. Takes a loader, too.

        One part without virtual ranks. With them one for each that this rank plays, with random streams seeded from
        (seed, step, virtual rank); when the loop ends the gradients are there, those of an earlier step are dropped at
        its beginning, and streams are the same on all ranks from there on. Under fully_shard a rank with fewer of them
        than another has a ``repeated`` part at the end.
        """
        yield from self._parallelism.parts(sampler, step, self._seed)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """torch's, of the 2-norm, for exact mode under fully_shard: added in an order that no sharding changes.

        Returns the norm before. A collective. Takes whole gradients, too, with the same bits.
        """
        return clip_grad_norm_fixed_order(parameters, max_norm, CollectiveTimer(self._session.record_wait))

    def guard(
        self,
        *,
        policy: GuardPolicy = "skip",
        rollback_copies: int = 1,
        copy_every: int = 10,
        max_refusals: int = 3,
        spike_threshold: float | None = 10.0,
        window: int = 64,
        warmup: int = 16,
    ) -> LossGuard:
        """A guard against losses that are NaN or jump; ask it before every update. Make it before ``track``.

        ::

            samples, weight = sampler.indices(guard.data_step), sampler.loss_weight(guard.data_step)
            ...
            (loss * weight).backward()
            if guard.allows(loss, weight):
                optimizer.step()

        A loss is refused that is NaN, infinite, or ``spike_threshold`` standard deviations above the last ``window``
        (once there are ``warmup``; None: never for that). Then no update is made, and the state goes back
        ``rollback_copies`` versions, of which one is kept every ``copy_every`` steps, and counts once the next loss is
        allowed; the first is what a generation begins with. What came after is computed again, by ``policy`` without
        the batch ("skip") or with it ("replay"). A second refusal in a row also skips the batch whose update came
        before the refused loss, since that update may be what is bad. After ``max_refusals`` refusals in a row
        ``allows`` raises LossDiverged.

        Costs ``rollback_copies`` copies of this rank's tracked state and one more, in the memory where it lies, one
        copy every ``copy_every`` steps on the training thread, and waiting for the loss in each step.
        ``rollback_copies=0`` only leaves the update out.

        Raises ValueError for settings that contradict each other.
        """
        if self._guard is not None:
            raise ValueError("this run has a guard already: one guards all that is tracked")
        rule = SpikeRule(threshold=spike_threshold, window=window, warmup=warmup)
        self._guard = LossGuard(
            self.mean,
            self._on_all_ranks,
            self._session.before_update,
            self._session.report_loss_refused,
            policy=policy,
            rollback_copies=rollback_copies,
            copy_every=copy_every,
            max_refusals=max_refusals,
            rule=rule,
            log_fields={"generation": self.generation, "rank": self.rank},
        )
        return self._guard

    def _on_all_ranks(self, here: bool) -> bool:
        if not self.distributed:
            return here
        flag = torch.tensor(float(here), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def track(
        self,
        *,
        exclude: Sequence[str] = (),
        per_rank: Sequence[str] = (),
        overlap: bool | None = None,
        slots: int | None = None,
        snapshot_every: int | None = None,
        require_checkpoints: bool = False,
        **objects: object,
    ) -> None:
        """Names what must survive, and restores it to the version that the generation agreed upon.

        Takes modules, optimizers and whatever has ``state_dict`` and ``load_state_dict``. Call it once, after all of
        it was built and before ``steps``. From then on the state is kept after every step; an optimizer's ``step``
        waits for the copy to be complete.

        ``exclude``: patterns, as of fnmatch, of full names such as ``model.teacher.*``: these tensors are neither
        stored nor restored. Each must match something.

        ``per_rank``: names of those, neither modules nor optimizers, whose state is this rank's alone (a position in
        its own file). It is given back to the same rank of as many only. Of all others any rank's state is taken for
        every rank's where the own one is gone.

        ``overlap``: state that no other rank holds (shards) on a CPU is copied before the next step begins, so that a
        lost rank costs no finished step; True copies it under the next step, as is done on a GPU where False is not
        said. ``slots``: 5 stores each step, 2 what is to be committed alone, in less memory; not said, 5 where every
        node of the job has the memory, else 2. ``snapshot_every``: with 5, a snapshot of so many steps one; not said,
        of each, or of fewer where training would be blocked for over a tenth of its time. See
        everstep_trainer.snapshot.slot_negotiation. ``require_checkpoints``: raise OutOfSlotMemory where a node has no
        memory for checkpoints, instead of training on without: here, or, where an optimizer has no state yet, before
        the second step changes anything. All six must be the same on all ranks.

        Raises TypeError for an object that cannot be tracked, ValueError for an optimizer of parameters that are in no
        module here, NotRestorable where the objects are others than those that were stored, or one that is a rank's own
        (or a StatefulDataLoader) meets another rank or world size.
        """
        if isinstance(exclude, str):
            raise TypeError(f"exclude takes a list of patterns: exclude=[{exclude!r}]")
        choices = SnapshotOptions(
            exclude=tuple(exclude),
            overlap=overlap,
            slots=slots,
            interval=snapshot_every,
            require_checkpoints=require_checkpoints,
        )
        replica = self._replicas.replica_for("run.track")
        self._parallelism.require_elementwise(objects.values())
        check_untracked(objects)
        if self.rank == 0 and not self._replicas.is_declared:
            warn_of_model_parallelism(objects.values(), self.world_size)
        kept = {
            key: PerRankLoader(tracked, replica.index, replica.count) if is_stateful_loader(tracked) else tracked
            for key, tracked in wrap_per_rank(objects, per_rank, self.rank, self.world_size).items()
        }
        self._loaders += [loader for loader in kept.values() if isinstance(loader, PerRankLoader)]
        if self._guard is not None:
            self._guard.require_compatible(objects)
            kept["guard"] = self._guard
        self._finished_step = self._session.track(kept, choices)
        self._has_tracked = True
        self._parallelism.synchronize_restored(kept, exclude)
        if self._guard is not None:
            self._guard.track_objects(
                {key: tracked for key, tracked in kept.items() if tracked is not self._guard}, exclude
            )
        self._updates.watch(objects)

    def steps(self, until: int, *, seed: int = 0) -> Iterator[int]:
        """The steps still to do, up to and including ``until``. A step is finished when the loop asks for the next.

        Before each one torch, ``random`` and numpy are seeded from (seed, step, replica): dropout does not depend on
        what failed before. With virtual ranks ``parts`` seeds them for each of these, and outside of it they are the
        same on all ranks. Leaving the loop by ``break`` leaves its step unfinished.

        All ranks must begin the same steps: where one has left the training function and another begins a later step,
        the job ends with an error. To stop early, let all ranks decide alike, on ``run.mean`` of the loss, say.
        """
        for step in range(self._finished_step + 1, until + 1):
            self.seed_step(step, seed=seed)
            yield step
            self.step_finished()

    def seed_step(self, step: int, *, seed: int = 0) -> None:
        """For a loop of one's own: the random streams that ``steps`` has in ``step``; none is restored otherwise."""
        self._seed = seed
        if step == self._finished_step + 1:  # streams of any other step may be asked for, by an evaluation say
            self._session.step_begun(step)
        seed_step(seed, step, *self._parallelism.rng_stream())

    def step_finished(self) -> None:
        """For a loop of one's own instead of ``steps``: the next step is finished, tracked state stands.

        Call ``seed_step`` where a step begins.

        Raises RuntimeError where the step had no gradients: a loop over ``parts`` was left before its end, or in exact
        mode there was none.
        """
        self._session.raise_if_interrupted()
        self._parallelism.step_finished()
        if self._guard is not None:
            self._guard.step_finished()
        if self.rank == 0:
            self._updates.step_finished()
        self._finished_step += 1
        self._session.step_finished(self._finished_step)
        self._warn_untracked()

    def _warn_untracked(self) -> None:
        """Warn once, after the first step, of a run that nothing is kept of."""
        if self._has_tracked or self._tier is not None:
            return
        self._has_tracked = True
        if self.rank == 0:
            log.warning(
                "nothing is tracked: after a failure this run would start from scratch; call "
                "run.track(model=..., optimizer=...) before the first step",
                extra={"generation": self.generation, "rank": self.rank},
            )

    def before_update(self) -> None:
        """Tracked state is about to change otherwise than by the ``step`` of a tracked optimizer, which asks by itself.

        Waits until the copy of the last step lets it change: call it right before an update by hand, by an optimizer
        that is not tracked, or of a momentum encoder in a forward pass. May be called several times in a step.
        """
        self._session.before_update()

    def report(self, *, loss: torch.Tensor | float) -> None:
        """This rank's loss, for people to watch. A tensor is read later, and never waited for.

        Raises ValueError for what is not one number.
        """
        self._session.report_loss(loss)

    def mean(self, value: Loss | None, weight: float = 1.0) -> torch.Tensor:
        """The mean of ``value`` over replicas, each times its ``sampler.weight``: the mean over samples. A collective.

        Of scalars, one for each of ``parts`` and times its weight, give the list: the mean over parts, which with
        virtual ranks is the same to the last bit at every world size. In a pipeline ranks without a loss give None for
        a scalar; the mean comes back on all.

        Raises ValueError where a replica has no loss, or on more of its ranks than another.
        """
        return self._parallelism.mean(value, weight)

    def atomic(self) -> AbstractContextManager[None]:
        """A section that no regrouping interrupts, such as the writing of a file. Keep it short."""
        return self._session.atomic()

    def close(self) -> None:
        """The training function was left: ends its loaders' workers, and what threads of it save. For its caller.

        An optimizer that outlives it asks this run no more.
        """
        self._updates.close()
        for loader in self._loaders:
            loader.close()
        if self._tier is not None:
            self._tier.is_over = True
