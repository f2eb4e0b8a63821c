"""The `Run` object that a training function receives: ranks, devices, data, tracked state and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from time import thread_time
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from everstep.vocabulary import AuditKind
from everstep.wire.v1.training import SdcPreset
from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.data.epochs import (
    EpochLoader,
    EpochSampler,
    IndexedBatches,
    SequentialBatches,
    is_indexed,
    loading_options,
    order_of,
)
from everstep_trainer.data.loader import Loader, is_stream
from everstep_trainer.data.rng import seed_step
from everstep_trainer.data.sampler import ElasticSampler, Sampler, StepPart
from everstep_trainer.data.stream import StreamSampler
from everstep_trainer.memory_tier.tier import MemoryTier
from everstep_trainer.parallel.exact.summation import clip_grad_norm_fixed_order
from everstep_trainer.parallel.replicas import (
    Loss,
    RankContext,
    Replica,
    ReplicaAssignment,
    StepParallelism,
    warn_of_model_parallelism,
)
from everstep_trainer.runtime.regroup_record import OnRegroup, OnReport, RunCallbacks
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.build import build_chain
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.presets import AuditOptions, audit_options
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.session.loss_guard import GuardOptions, GuardPolicy, LossGuard
from everstep_trainer.session.optimizer_hooks import OptimizerHooks
from everstep_trainer.snapshot.pace import DEFAULT_BUDGET
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.generators import wrap_generators
from everstep_trainer.state.python_state import wrap_per_rank
from everstep_trainer.state.stateful_loader import PerRankLoader, is_stateful_loader
from everstep_trainer.state.tracked_objects import holds_shards
from everstep_trainer.state.untracked_state import check_untracked, require_storable

log = logging.getLogger(__name__)

MAX_SECTION_CHARS = 80  # of the name of a section in messages

_generation_hooks: list[Callable[[], None]] = []


def before_each_generation(hook: Callable[[], None]) -> None:
    """Call ``hook`` before the training function in each generation from the next on, however often it is registered.

    For integrations: a library's process-wide state would otherwise describe the ranks of the previous generation.
    """
    if hook not in _generation_hooks:
        _generation_hooks.append(hook)


def call_generation_hooks() -> None:
    """Call the hooks of ``before_each_generation``. For `main` only."""
    for hook in _generation_hooks:
        hook()


_newest: ref[Run] | None = None


def newest_run() -> Run | None:
    """Return the run of this process's newest call of the training function, if it still exists; for integrations."""
    return None if _newest is None else _newest()


class Closable(Protocol):
    """A resource of one generation."""

    def close(self) -> None: ...


class Run:
    """One call of the training function: one rank in one generation.

    ``everstep.main`` creates it and passes it to the training function. Steps are counted from 1; step 0 is the state
    before any step. Not thread-safe: use it in the thread of the training function only.

    Example::

        def train(run: everstep.Run) -> None:
            model = run.replicate(Model().to(run.device))
            optimizer = torch.optim.AdamW(model.parameters())
            loader = run.loader(dataset, global_batch=32)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(until=1000):
                optimizer.zero_grad()
                loss = model(loader.batch(step)).mean()
                (loss * loader.loss_weight(step)).backward()
                optimizer.step()
    """

    def __init__(self, context: RankContext, session: TrainingSession) -> None:
        global _newest
        _newest = ref(self)
        self._context, self._session = context, session
        self._finished_step = 0
        self._has_tracked = context.generation == 0  # without Everstep there is nothing to warn about
        self._seed = 0
        device = context.device if self.distributed else None
        self._replicas = ReplicaAssignment(context.rank, context.world_size, device)
        self._parallelism = StepParallelism(context, self._replicas, session.record_wait)
        self._loaders: list[Closable] = []
        self._tier: MemoryTier | None = None
        self._guard: LossGuard | None = None
        log_fields = {"generation": context.generation, "rank": context.rank}
        self._updates = OptimizerHooks(self._before_tracked_update, log_fields)
        self._callbacks = RunCallbacks(log_fields)
        self._audits: AuditChain | None = None

    @property
    def rank(self) -> int:
        """Number of this rank in its generation, from 0. It may change from one generation to the next."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in this generation."""
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node, from 0; the same in every generation."""
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of this generation's ranks on this node."""
        return self._context.local_world_size

    @property
    def job(self) -> str:
        """Name of the job; empty without Everstep."""
        return self._context.job

    @property
    def generation(self) -> int:
        """Number of the generation; 0 without Everstep."""
        return self._context.generation

    @property
    def device(self) -> torch.device:
        """The CUDA device of this rank under NCCL, otherwise the CPU."""
        return self._context.device

    @property
    def distributed(self) -> bool:
        """True if there is a process group, even one of a single rank."""
        return self._context.mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """A new one-dimensional device mesh over all ranks of this generation.

        Raises:
            RuntimeError: There is no process group.
        """
        if self._context.mesh is None:
            raise RuntimeError("there is no process group: check run.distributed before using run.mesh")
        return self._context.mesh()

    @property
    def tier(self) -> MemoryTier:
        """This rank's handle of the memory tier, for ``everstep_trainer.memory_tier.dcp``.

        Raises:
            RuntimeError: The script was not started by ``everstep-launch``.
        """
        if self._tier is None:
            if self._context.tier is None:
                raise RuntimeError("there is no memory tier: start the program with everstep-launch")
            self._tier = self._context.tier()
        return self._tier

    @property
    def last_finished_step(self) -> int:
        """Number of the last finished step; 0 before the first."""
        return self._finished_step

    def data_parallel(self, replicas: DeviceMesh | tuple[int, int], *, stage: DeviceMesh | int = 0) -> Replica:
        """Declare which replica of the model this rank belongs to, for models that span several ranks. A collective.

        Ranks of one replica then get the same samples and the same random numbers, and their loss counts once. Under
        DDP, FSDP2 and HSDP alone every rank is a replica, and no call is needed. Call it in each generation right after
        the mesh is made, before ``sampler``, ``loader``, ``replicate``, ``track`` and ``steps``.

        Example::

            mesh = init_device_mesh(run.device.type, (run.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
            run.data_parallel(mesh["dp"])

        Args:
            replicas: The submesh of this generation's mesh that holds one rank of each replica, with all its dimensions
                (``mesh["replicate", "shard"]``). Or a pair (index, count); (0, 1) if all ranks form one replica.
            stage: This rank's pipeline stage, as a number or as the submesh of the pipeline (``mesh["pp"]``). Each
                stage has its own random numbers; otherwise dropout would hit the same positions in every stage.

        Returns:
            The replica of this rank.

        Raises:
            ValueError: Ranks disagree, replicas would differ in size, the mesh is another generation's, or an earlier
                call already assumed one replica per rank.
        """
        return self._replicas.declare(replicas, stage)

    def sampler(self, size: int, *, global_batch: int, seed: int = 0, drop_last: bool = False) -> ElasticSampler:
        """Return a sampler over ``size`` samples for this rank's replica.

        Example::

            sampler = run.sampler(len(dataset), global_batch=32)
            for step in run.steps(until=1000):
                samples = sampler.indices(step)

        Args:
            size: Number of samples in the data set.
            global_batch: Samples per optimizer step over all ranks.
            seed: Seed of the shuffle.
            drop_last: End each epoch at its last whole batch; otherwise a batch may straddle two epochs.

        Returns:
            An `ElasticSampler`.

        Raises:
            ValueError: The data set is smaller than a batch, or the batch is smaller than the number of replicas.
        """
        replica = self._replicas.replica_for("run.sampler")
        rank, world = replica.index, replica.count
        return ElasticSampler(
            size, global_batch=global_batch, seed=seed, rank=rank, world_size=world, drop_last=drop_last
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
        """Return a DataLoader that is indexed by step.

        Ask it for ``loader.batch(step)``, or iterate ``run.parts(loader, step)``. Map-style data are shuffled as by
        ``sampler``. Iterable data keep their own order, and each replica receives its share of every global batch. Give
        an iterable data set a method ``seek(position)`` (see `everstep_trainer.data.stream`). Without ``seek`` each
        rank also reads the samples of all others and, after a restore, everything that came before. Each reader needs
        the whole sequence, so the data set must not split itself by rank, and worker processes are hidden from it.

        Random numbers that a data set draws for a sample depend only on (seed, step, position in the global batch).
        Those of the collate function depend on (seed, step, position of its first sample), so they change with the
        number of replicas unless there are virtual ranks. An iterable data set without ``seek`` draws from one stream
        per epoch, seeded by (seed, epoch), so that all readers shuffle alike.

        Args:
            dataset: A map-style or iterable data set.
            global_batch: Samples per optimizer step over all ranks.
            seed: Seed of the shuffle and of the random numbers above.
            drop_last: As for ``sampler``; not allowed for iterable data.
            fetch_together: Pass all indices of this rank to ``__getitems__`` at once instead of one at a time. Random
                numbers are then seeded as for a collate function.
            options: Passed to DataLoader, such as num_workers, prefetch_factor and collate_fn.

        Returns:
            A `Loader`, which is also a sampler.

        Raises:
            TypeError: An option is reserved here, or ``fetch_together`` is set for data without ``__getitems__``.
            ValueError: A batch cannot be taken from the data or split over the ranks.
        """
        if not is_stream(dataset):
            sampler = self.sampler(len(dataset), global_batch=global_batch, seed=seed, drop_last=drop_last)
        elif drop_last:
            raise TypeError("drop_last is not supported for iterable data, whose length is unknown")
        else:
            replica = self._replicas.replica_for("run.loader")
            sampler = StreamSampler(global_batch=global_batch, rank=replica.index, world_size=replica.count)
        made = Loader(dataset, sampler, self._parallelism.assigned_ranks, seed, options, fetch_together=fetch_together)
        self._loaders.append(made)
        return made

    def epoch_loader(
        self,
        loader: Any,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        accumulates: int = 1,
        place: Callable[[Any], Any] | None = None,
    ) -> EpochLoader:
        """Return the epochs of the script's own DataLoader, which continue at the next batch after a restore.

        Each epoch's order depends on (seed, epoch) alone, and each global batch is split over the ranks. The loader's
        sampler, batch size, collate function and workers are kept. A batch may be smaller at the end of an epoch, as in
        torch; ranks whose shares differ have different values of ``loss_weight``. An iterable data set, or an iterable
        that is no DataLoader, is read again up to the next batch, and splits itself over the ranks.

        Example::

            loader = run.epoch_loader(DataLoader(dataset, batch_size=8, shuffle=True))
            run.track(model=model, optimizer=optimizer)
            for epoch in loader.epochs(3):
                for batch in loader:
                    loss = model(batch).mean()
                    (loss * loader.loss_weight).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        Args:
            loader: A DataLoader, as for one rank of the whole job, or another iterable of batches.
            global_batch: Samples of a batch over all ranks; default: the loader's batch on each rank.
            seed: Seed of the shuffle and of the random streams of steps.
            accumulates: Batches of one update. The last update of an epoch may have fewer.
            place: Called with each batch, such as to move it to a device.

        Raises:
            ValueError: The number of ranks may change and no ``global_batch`` is given, or the data make no batch.
        """
        if not is_indexed(loader):
            sequential = SequentialBatches(loader, seed)
            self._loaders.append(sequential)
            batches: IndexedBatches | SequentialBatches = sequential
        else:
            replica = self._replicas.replica_for("run.epoch_loader")
            if global_batch is None and self._context.is_elastic:
                raise ValueError(
                    "the number of ranks of this job may change, so the batch size of one rank does not determine the "
                    "samples of a step: give global_batch, the samples over all ranks"
                )
            order = order_of(loader, global_batch, replica.count, seed)
            sampler = EpochSampler(order, rank=replica.index, world_size=replica.count)
            made = Loader(loader.dataset, sampler, self._parallelism.assigned_ranks, seed, loading_options(loader))
            self._loaders.append(made)
            batches = IndexedBatches(made, sampler, order.batches, is_persistent=loader.persistent_workers)
        dataset = getattr(loader, "dataset", None)
        return EpochLoader(self, batches, dataset, seed=seed, accumulates=accumulates, place=place)

    def exact_gradients(self, model: nn.Module) -> None:
        """Add the gradients of a DistributedDataParallel that a framework has built in the order of ranks.

        ``run.replicate`` does it already. Without it the results after a regroup differ by rounding.

        Args:
            model: The wrapped model, before the first backward pass. Parts with a hook of their own are left alone.

        Raises:
            TypeError: A part has sparse gradients.
        """
        self._parallelism.make_exact(model)

    def replicate(
        self, model: nn.Module, *, exact: bool = True, virtual_ranks: int | None = None, **options: Any
    ) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel; return it unchanged if there is no process group.

        With ``virtual_ranks`` (exact mode, docs/how-to/exact-mode.md) the model itself is returned, and ``parts``
        computes its gradients. Exact mode also accepts a model that ``fully_shard`` has sharded over all ranks.

        Args:
            model: The model, on ``run.device``.
            exact: Add gradients in the order of ranks. A run that lost and replaced a rank then continues bit for bit
                as if nothing had happened.
            virtual_ranks: Compute bit for bit the results of this number of ranks, whatever the world size is. It must
                not change during the life of a run.
            options: Passed to DistributedDataParallel.

        Returns:
            The model to call in the training loop.

        Raises:
            ValueError: A named part of the model cannot be exact.
            TypeError: As ValueError, because of a type.
        """
        return self._parallelism.replicate(model, exact, virtual_ranks, options)

    def parts(self, sampler: Sampler, step: int) -> Iterator[StepPart]:
        """Yield the parts of ``step`` that this rank computes; run a forward and a backward pass for each.

        Without virtual ranks there is one part. With them there is one per virtual rank that this rank plays, and its
        random streams are seeded from (seed, step, virtual rank). Gradients of an earlier step are dropped when the
        loop begins; the step's gradients are complete when it ends. From then on random streams are the same on all
        ranks. Under ``fully_shard`` a rank with fewer parts than another gets a part with ``is_repeat`` at the end.

        Example::

            for part in run.parts(sampler, step):
                loss = loss_of(model, dataset[part.indices])
                (loss * part.loss_weight).backward()

        Args:
            sampler: A sampler or a loader; a loader also fills ``part.batch``.
            step: The step, from 1.
        """
        yield from self._parallelism.parts(sampler, step, self._seed)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip gradients by their 2-norm, like torch's function, with the same bits however they are sharded.

        A collective. Needed for exact mode under ``fully_shard``; accepts unsharded gradients as well.

        Args:
            parameters: Parameters whose gradients are clipped in place.
            max_norm: Largest 2-norm over all gradients.

        Returns:
            The norm before clipping.
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
        """Return a guard against losses that are NaN or jump; ask it before every update. Call it before ``track``.

        A refused loss makes no update. The state goes back to the oldest kept copy, and later steps are computed again.
        A copy is taken every ``copy_every`` steps and counts once the next loss was allowed; the first one is the state
        that the generation began with. A second refusal in a row also skips the batch of the update before the refused
        loss, since that update may be the cause.

        The guard costs ``rollback_copies`` + 1 copies of this rank's tracked state, on the device that holds it. It
        also costs the time of one copy every ``copy_every`` steps on the training thread, and a wait for the loss in
        each step.

        Example::

            guard = run.guard()
            ...
            samples, weight = sampler.indices(guard.data_step), sampler.loss_weight(guard.data_step)
            ...
            (loss * weight).backward()
            if guard.allows(loss, weight):
                optimizer.step()

        Args:
            policy: "skip" leaves the refused batch out when steps are computed again; "replay" computes it again.
            rollback_copies: Copies to keep; 0 only leaves the update out.
            copy_every: Steps from one copy to the next.
            max_refusals: Refusals in a row after which ``allows`` raises LossDiverged.
            spike_threshold: Refuse a loss this many standard deviations above the last ones; None refuses only NaN and
                infinities.
            window: Number of last losses to compare with. More mistake slow change for a spike, fewer mistake noise.
            warmup: Losses needed before ``spike_threshold`` applies.

        Raises:
            ValueError: Settings contradict each other, or the run has a guard already.
        """
        if self._guard is not None:
            raise ValueError("this run has a guard already: it guards everything that is tracked")
        options = GuardOptions(
            policy=policy,
            rollback_copies=rollback_copies,
            copy_every=copy_every,
            max_refusals=max_refusals,
            spike_threshold=spike_threshold,
            window=window,
            warmup=warmup,
        )
        session, log_fields = self._session, {"generation": self.generation, "rank": self.rank}
        self._guard = LossGuard(
            self.mean, self._on_all_ranks, session.before_update, self._handle_refusal, options, log_fields
        )
        return self._guard

    def _handle_refusal(self, data_step: int, message: str) -> None:
        self._session.report_loss_refused(data_step, message)
        if self._audits is not None:
            self._audits.update_refused(self._finished_step + 1)

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
        snapshot_budget: float = DEFAULT_BUDGET,
        require_checkpoints: bool = False,
        sdc: SdcPreset | None = None,
        sdc_audits: Mapping[str, Mapping[str, float] | None] | None = None,
        **objects: object,
    ) -> None:
        """Name the objects that must survive failures, and restore them to the version that the generation agreed on.

        Takes modules, optimizers, random generators (of torch, numpy and ``random``) and objects with ``state_dict``
        and ``load_state_dict``. Call it once, after all objects are built and before ``steps``. From then on the state
        is snapshotted after every step, or as often as ``snapshot_budget`` allows, and an optimizer's ``step`` waits
        until the copy is complete. All options must be the same on all ranks.

        Example::

            run.track(model=model, optimizer=optimizer, schedule=schedule, exclude=["model.teacher.*"])

        Args:
            exclude: fnmatch patterns of full names, such as ``model.teacher.*``. These tensors are neither stored nor
                restored. Each pattern must match something.
            per_rank: Names of objects whose state belongs to this rank alone, such as a position in its own file.
                Modules and optimizers cannot be named. The state is restored only to the same rank of the same world
                size. For all other objects, any rank's state may replace that of a lost rank.
            overlap: Copy state that no other rank holds (shards) under the next step; a lost rank may then cost that
                step. Default: only on GPUs. Other state is always copied under the next step.
            slots: 5 stores steps; 2 stores only versions that will be committed, in less memory. Default: 5 if
                every node of the job has the memory, else 2.
            snapshot_every: With 5 slots, steps from one snapshot to the next, whatever they cost. With n, a loss may
                repeat up to n - 1 finished steps. Default: 1 where that fits into ``snapshot_budget``, else up to 8.
            snapshot_budget: Share of training's time that snapshots may take before they become less frequent than
                every step; measured in the run. Where ranks wait for cores, the hooks' other work counts too. Without
                effect beside ``snapshot_every``, and with 2 slots.
            require_checkpoints: Raise OutOfSlotMemory if a node has no memory for checkpoints, instead of training
                without. The error comes from ``track`` or, if an optimizer has no state yet, before the second step
                changes anything.
            sdc: How thoroughly the ranks check each other's work for silent corruption: "off", "light" (1 % of a
                step), "standard" (3 %) or "paranoid" (30 %). Default: as ``everstep-launch --sdc`` says. The launcher's
                ``--sdc-mode`` says what follows from a difference.
            sdc_audits: Changes to single audits of that preset, such as ``{"peer_replay": {"interval": 10}}``, which
                audits every 10 steps, ``{"matmul": {"share": 0.01}}`` or ``{"state": None}`` (off).
            objects: The objects, by name.

        Raises:
            TypeError: An object cannot be tracked.
            ConfigurationError: An object that is no module holds too many bytes.
            ValueError: An optimizer has parameters that belong to no tracked module.
            NotRestorable: The objects differ from the stored ones, or per-rank state (or a StatefulDataLoader) meets
                another rank or world size.
        """
        if isinstance(exclude, str):
            raise TypeError(f"exclude takes a list of patterns: exclude=[{exclude!r}]")
        preset = sdc or self._session.sdc_preset
        audits = self._choose_audits(audit_options(preset, sdc_audits, is_sharded=holds_shards(objects)))
        if audits and sdc is not None:
            self._warn_if_audits_only_report(sdc)
        choices = SnapshotOptions(
            copy_audits=audits.get(AuditKind.CHECKPOINT),
            exclude=tuple(exclude),
            overlap=overlap,
            slots=slots,
            interval=snapshot_every,
            budget=snapshot_budget,
            require_checkpoints=require_checkpoints,
        )
        replica = self._replicas.replica_for("run.track")
        objects = wrap_generators(objects, self.rank, self.world_size)
        self._check_trackable(objects)
        self._restore(self._wrap_per_rank(objects, per_rank, replica), objects, choices)
        self._updates.watch(objects)
        self._start_audits(audits, objects, preset)

    def _restore(self, wrapped: dict[str, object], objects: Mapping[str, object], choices: SnapshotOptions) -> None:
        """Track the wrapped objects, and with them the guard of the losses; restore the agreed version, if any."""
        guard, tracked = self._guard, dict(wrapped)
        if guard is not None:
            guard.require_compatible(objects)
            tracked["guard"] = guard
        self._finished_step = self._session.track(tracked, choices)
        self._has_tracked = True
        self._parallelism.synchronize_restored(tracked, choices.exclude, self._session.running_buffers)
        if guard is not None:
            guard.track_objects(wrapped, choices.exclude)

    def _check_trackable(self, objects: Mapping[str, object]) -> None:
        self._parallelism.require_elementwise(objects.values())
        check_untracked(objects)
        require_storable({key: tracked for key, tracked in objects.items() if not is_stateful_loader(tracked)})
        if self.rank == 0 and not self._replicas.is_declared:
            warn_of_model_parallelism(objects.values(), self.world_size)

    def _wrap_per_rank(
        self, objects: Mapping[str, object], per_rank: Sequence[str], replica: Replica
    ) -> dict[str, object]:
        """Wrap the objects whose state belongs to one rank or replica: those in ``per_rank``, and stateful loaders."""
        wrapped = {
            key: PerRankLoader(tracked, replica.index, replica.count) if is_stateful_loader(tracked) else tracked
            for key, tracked in wrap_per_rank(objects, per_rank, self.rank, self.world_size).items()
        }
        self._loaders += [loader for loader in wrapped.values() if isinstance(loader, PerRankLoader)]
        return wrapped

    def _choose_audits(self, options: Mapping[AuditKind, AuditOptions]) -> dict[AuditKind, AuditOptions]:
        """Return the audits without those that the controller has switched off for this job."""
        off = [kind for kind in options if kind in self._session.audits_off]
        if off and self.rank == 0:
            log.warning(
                "audits that are off for the rest of this job, because the program makes them differ: %s "
                "(`everstep job show` says why)",
                ", ".join(off),
            )
        return {kind: chosen for kind, chosen in options.items() if kind not in off}

    def _warn_if_audits_only_report(self, sdc: SdcPreset) -> None:
        if self._session.sdc_mode == "report" and self.rank == 0:
            log.warning(
                "sdc=%r of run.track: audits only report; `everstep-launch --sdc-mode enforce` acts on differences",
                sdc,
            )

    def _start_audits(
        self, options: Mapping[AuditKind, AuditOptions], objects: Mapping[str, object], preset: SdcPreset
    ) -> None:
        if not options:
            return
        setup = AuditSetup(
            rank=self.rank,
            world_size=self.world_size if self.distributed else 1,
            nodes=self._session.nodes,
            device=self.device,
            objects=objects,
            ddp_wrappers=tuple(self._parallelism.ddp_wrappers),
            has_replica_per_rank=self._replicas.has_replica_per_rank,
            report=self._report_mismatch,
            keep_wrong_product=self._session.keep_wrong_product,
        )
        name = "sdc_audits" if preset == "off" else preset
        self._audits = build_chain(options, setup, self._finished_step + 1, self._session.report_clean_audits, name)

    def _report_mismatch(self, mismatch: Mismatch) -> None:
        if self._audits is not None and not mismatch.clears_owner:
            self._audits.record_mismatch()
        self._session.report_mismatch(mismatch)

    def _before_tracked_update(self) -> None:
        began_s = thread_time()
        if self._audits is not None:  # first: they run while the last snapshot is copied
            self._audits.before_update(self._finished_step + 1)
        self._session.before_update()
        self._session.record_hook_cpu(thread_time() - began_s)

    def steps(self, until: int, *, seed: int = 0) -> Iterator[int]:
        """Yield the steps still to do, up to and including ``until``.

        A step is finished when the loop asks for the next one; leaving the loop by ``break`` leaves its step
        unfinished. Before each step torch, ``random`` and numpy are seeded from (seed, step, replica), so dropout does
        not depend on earlier failures. With virtual ranks ``parts`` seeds them for each part, and outside of it all
        ranks draw alike.

        All ranks must begin the same steps. If one rank has left the training function and another begins a later step,
        the job ends with an error. To stop early, let all ranks decide alike, for example on ``run.mean`` of the loss.

        Args:
            until: The last step.
            seed: Seed of the random streams.
        """
        self._session.plan_steps(until)
        for step in range(self._finished_step + 1, until + 1):
            self.seed_step(step, seed=seed)
            yield step
            self.step_finished()
        self.end_steps()

    def end_steps(self) -> None:
        """Say that no step follows, in a custom loop; ``steps`` does it after its last step.

        A rank may then work for which the others wait, such as saving the model. It is not taken for hung before
        ``--work-limit-s``. If a rank is lost in that work, the function is called again and computes the last step
        again, if the version before it is left; else it has no step left.
        """
        self._session.on_steps_ended(self._finished_step)

    def seed_step(self, step: int, *, seed: int = 0) -> None:
        """Seed the random streams of ``step`` as ``steps`` does, for a custom loop; random state is not restored
        otherwise."""
        began_s, self._seed = thread_time(), seed
        if step == self._finished_step + 1:  # an evaluation may ask for the streams of other steps
            self._session.on_step_begun(step)
            if self._audits is not None:
                self._audits.begin_step(step)
        seed_step(seed, step, *self._parallelism.rng_stream())
        self._session.record_hook_cpu(thread_time() - began_s)

    def step_finished(self) -> None:
        """Mark the next step as finished, in a custom loop that calls ``seed_step`` where a step begins.

        Example::

            while run.last_finished_step < 1000:
                run.seed_step(run.last_finished_step + 1)
                ...
                run.step_finished()

        Raises:
            RuntimeError: The step made no gradients: a loop over ``parts`` was left early, or exact mode had no loop.
        """
        began_s = thread_time()
        self._session.raise_if_interrupted()
        self._parallelism.step_finished()
        if self._guard is not None:
            self._guard.step_finished()
        if self.rank == 0:
            self._updates.step_finished()
        if self._audits is not None:
            self._audits.step_finished(self._finished_step + 1)
        self._finished_step += 1
        try:
            self._session.on_step_finished(self._finished_step)
        finally:  # the step is finished, even if a regroup ends the generation now
            self._pass_on_regroup()
        self._session.record_hook_cpu(thread_time() - began_s)
        if not self._has_tracked and self._tier is None:
            self._has_tracked = True  # warn once
            if self.rank == 0:
                log.warning(
                    "nothing is tracked: after a failure this run would start from scratch; call "
                    "run.track(model=..., optimizer=...) before the first step",
                    extra={"generation": self.generation, "rank": self.rank},
                )

    def before_update(self) -> None:
        """Wait until the snapshot of the last step allows tracked state to change.

        Tracked optimizers call it themselves. Call it right before any other change: an update by hand or by an
        untracked optimizer, or a momentum encoder in a forward pass. Several calls in one step are allowed.
        """
        self._session.before_update()

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Report this rank's loss for display. A tensor is read later, without a wait for the device.

        Raises:
            ValueError: The loss is not a single number.
        """
        self._session.report_loss(loss)
        if self._callbacks.on_report:
            with self._session.atomic():
                self._callbacks.reported(self._finished_step + 1, loss)

    def on_regroup(self, callback: OnRegroup) -> None:
        """Call ``callback(record)`` on this rank after the first finished step that follows a regroup.

        Register it in each generation before the first step, on all ranks: a new process then learns from the others
        when the last step was finished. The callback runs on the training thread and delays the step, so it must be
        quick. If it raises an exception, it is logged and not called again in this generation.

        Example::

            run.on_regroup(lambda regroup: print(regroup.cause, regroup.lost_s))

        Args:
            callback: Receives an `everstep_trainer.runtime.regroup_record.RegroupRecord`.
        """
        self._session.share_tally()
        self._callbacks.on_regroup.append(callback)

    def on_report(self, callback: OnReport) -> None:
        """Call ``callback(step, loss)`` on this rank for each loss passed to ``report``; as for ``on_regroup``.

        Args:
            callback: Receives the running step and the loss as it was reported; a tensor may still be on its device.
        """
        self._callbacks.on_report.append(callback)

    def _pass_on_regroup(self) -> None:
        record = self._session.take_regroup_record()
        if record is not None and self._callbacks.on_regroup:
            with self._session.atomic():
                self._callbacks.regrouped(record)

    def mean(self, value: Loss | None, weight: float = 1.0) -> torch.Tensor:
        """Return the mean of ``value`` over all samples. A collective.

        Args:
            value: This replica's mean loss. With ``parts``, a list of one scalar per part, each already multiplied by
                its ``loss_weight``; with virtual ranks the mean is then bit for bit the same at every world size. In a
                pipeline, ranks without a loss pass None and receive the mean as well.
            weight: This replica's ``sampler.loss_weight(step)``.

        Raises:
            ValueError: A replica has no loss, or has it on more ranks than another replica.
        """
        return self._parallelism.mean(value, weight)

    def atomic(self) -> AbstractContextManager[None]:
        """Return a context manager for a section that no regrouping interrupts, such as writing a file. Keep it short.

        A rank in the section counts as working: it is not taken for hung before the job's ``--work-limit-s``.

        Example::

            with run.atomic():
                torch.save(metrics, path)
        """
        return self._session.atomic()

    def alone(self, name: str, *, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Return a context manager for work of this rank for which the other ranks may wait, such as an evaluation.

        The rank is not taken for hung in it, whatever its process does, before ``limit_s`` have passed. Unlike
        ``atomic`` it does not postpone a regroup: one that comes meanwhile interrupts the section. No call is needed
        for work that uses the processor or does I/O, which is recognized by itself.

        Example::

            if run.rank == 0 and step % 1000 == 0:
                with run.alone("validation", limit_s=3600):
                    validate(model)

        Args:
            name: What the rank does, for messages and the web page.
            limit_s: Seconds after which the rank counts as hung in this section. Default: ``--work-limit-s``.

        Raises:
            ValueError: The name is empty, or the limit is not positive.
        """
        if not name.strip():
            raise ValueError('run.alone needs a name for messages, such as run.alone("validation")')
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"run.alone: limit_s must be positive, not {limit_s}; omit it for the job's limit")
        return self._session.alone(name[:MAX_SECTION_CHARS], limit_s)

    def close(self) -> None:
        """Release hooks, loader workers and the memory tier after the training function was left. For `main` only."""
        self._parallelism.close()
        self._updates.close()
        self._callbacks.close()
        if self._audits is not None:
            self._audits.close()
        for loader in self._loaders:
            loader.close()
        if self._tier is not None:
            self._tier.is_over = True
