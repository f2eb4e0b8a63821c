"""Run a DeepSpeed engine inside a training function, with ZeRO's shards snapshotted after every update.

Example::

    def train(run):
        config = reset_deepspeed(run, CONFIG, global_batch=32)
        engine, *_ = deepspeed.initialize(model=Model(), config=config)
        loader = run.loader(dataset, global_batch=32, seed=1)
        track_engine(run, engine)
        for step in run.steps(until=10_000, seed=1):
            for batch, weight in micro_batches(engine, loader, step):
                engine.backward(engine(batch.to(run.device)) * weight)
                engine.step()

ZeRO stages 0 to 3 with data parallelism over all ranks, in float32, bfloat16 or float16. Master weights and optimizer
state are stored by the names of parameters, so a version restores at any world size. A step of the run is an update:
``gradient_accumulation_steps`` batches of the loader. Gradients are not stored, so a restored run computes all batches
of an update again.

The private parts of DeepSpeed used here were read in version 0.19.8.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import _lru_cache_wrapper, partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups

from everstep.layout.manifests import Box
from everstep_trainer.data.loader import Loader
from everstep_trainer.integrations.adapter_parts.deepspeed_partitions import Flat, flats_of, stage_3_length
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run
from everstep_trainer.state.optimizer_state import map_tensors
from everstep_trainer.state.python_state import group_options, load_options
from everstep_trainer.state.sharded_state import Shard, ShardedState

# ---- what DeepSpeed keeps for the whole process

SHARED_MEMORY_OP = "deepspeed_shm_comm"


def _destroy_engines() -> None:
    """Release the engines of the previous generation, which hooks on gradients keep alive where no collector sees them.

    Called in the next generation, since destroying an engine asks the process group for its rank, and waits for the
    device, where a collective could still hang. An interrupt may have left an engine half built.
    """
    kinds = (DeepSpeedEngine, DeepSpeedOptimizer)
    for leftover in [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), kinds) and hasattr(type(candidate), "destroy")
    ]:
        with suppress(Exception):  # it is half built
            leftover.destroy()
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if isinstance(cell.cell_contents, _lru_cache_wrapper):  # the cache of a decorated method keeps its objects
                cell.cell_contents.cache_clear()


def reset_process_state() -> None:
    """Drop DeepSpeed's process-wide state of the previous generation: groups, counters, patches of torch.

    ZeRO-3 compares the numbers of modules and parameters between ranks. A process that replaces a lost one counts from
    zero, so all ranks must. Collectives in shared memory are switched off: they spin until all peers answer, and
    nothing can end that when a peer is lost.
    """
    if dist.is_initialized() and deepspeed.comm.comm.cdb is not None:
        _destroy_engines()
    # torch is patched while a model is built under zero.Init; an interrupt may have hit the exit of that context
    partition_parameters.shutdown_init_context()
    partition_parameters.zero_init_context = 0
    partition_parameters.top_level_context = None
    partition_parameters.Init.param_id = 0
    parameter_offload.FWD_MODULE_STACK.clear()
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0  # number of modules
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    comm = deepspeed.comm.comm
    for backend in ("cdb", "nccl_backend", "mpi_backend", "ccl_backend", "hccl_backend"):
        setattr(comm, backend, None)
    comm.timers.timers.clear()  # one that an interrupt left running refuses to start
    groups._release_process_group_references()
    tracker = engine_module._ENGINE_BACKWARD_GRAPH_TRACKER
    tracker._active_states.clear()
    tracker._graph_task_refcounts.clear()
    engine_module._ENGINE_BACKWARD_GRAPH_CONTEXT.set(())
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    checkpointing.reset()
    checkpointing.mpu = checkpointing.mp_group = checkpointing.num_layers = checkpointing.timers = None
    checkpointing.mp_rank, checkpointing.mp_size = 0, 1
    checkpointing.deepspeed_checkpointing_enabled = False
    checkpointing._CUDA_RNG_STATE_TRACKER.reset()
    gc.collect()  # engines are cycles


def reset_deepspeed(run: Run, config: Mapping[str, Any], *, global_batch: int) -> dict[str, Any]:
    """Drop the previous generation's process-wide state, and return the configuration for this world size.

    Call it first in the training function, before ``deepspeed.zero.Init`` and ``deepspeed.initialize``. DeepSpeed
    requires train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, which a fixed
    configuration breaks at another world size. So the first is left out, and the second is this world's:
    ``global_batch`` over the ranks, rounded up. ``micro_batches`` gives uneven shares their weights.

    Args:
        run: The run of the training function.
        config: DeepSpeed's configuration; it is not changed.
        global_batch: Samples of a micro-batch over all ranks, as for ``run.loader``.

    Returns:
        The configuration for ``deepspeed.initialize``.
    """
    reset_process_state()
    sized = deepcopy(dict(config))
    sized.pop("train_batch_size", None)
    sized["train_micro_batch_size_per_gpu"] = -(-global_batch // run.world_size)
    sized.setdefault("gradient_accumulation_steps", 1)
    return sized


# ---- the engine's state


def _refuse_unsupported(engine: DeepSpeedEngine) -> None:
    """Raise ValueError for a configuration whose state is not stored completely."""
    world, optimizer = dist.get_world_size(), engine.optimizer
    offload = engine.zero_offload_optimizer()
    refused = {
        "pipeline parallelism": engine.pipeline_parallelism,
        "mixture of experts": engine.has_moe_layers,
        "model or sequence parallelism": engine.dp_world_size != world or engine.seq_dp_world_size != world,
        "ZeRO's secondary partitions (zero_hpz_partition_size, MiCS)": engine.zero_hpz_partition_size() > 1
        or any(dist.get_world_size(p.ds_process_group) != world for p in _partitioned(engine)),
        "zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
        "offload to NVMe": any(
            to is not None and to.device == OffloadDeviceEnum.nvme for to in (offload, engine.zero_offload_param())
        ),
        "offload of a part (ratio)": bool(offload is not None and offload.ratio != 1.0),
        "training without an optimizer": optimizer is None or not hasattr(optimizer, "param_groups"),
    }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ValueError(f"Everstep does not store the state of a DeepSpeed engine with {', '.join(names)}")


def _partitioned(engine: DeepSpeedEngine) -> list[Any]:
    """Return the parameters that ZeRO-3 has partitioned."""
    return [parameter for parameter in engine.module.parameters() if hasattr(parameter, "ds_tensor")]


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_MASTER, _FROZEN = "master", "weight"  # keys of shards that are no optimizer state


class EngineState(ShardedState):
    """All state of an engine but the module's: master weights, optimizer state, loss scale, counters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._flats = flats_of(engine)
        self._wrapped = bool(self._flats)
        self._basic: torch.optim.Optimizer = engine.optimizer.optimizer if self._wrapped else engine.optimizer
        self._frozen = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if hasattr(parameter, "ds_tensor") and not parameter.requires_grad
        ]

    @property
    def basic(self) -> torch.optim.Optimizer:
        """The optimizer inside the engine's."""
        return self._basic

    @property
    def optimizers(self) -> Collection[torch.optim.Optimizer]:
        return [self._basic] if self._wrapped else []

    def shards(self) -> Iterator[Shard]:
        for flat in self._flats:
            yield from flat.shards(_MASTER, flat.holder, flat.at)
            state = self._basic.state.get(flat.tensor, {})
            for key in state:
                if self._is_sharded(flat, key, state[key]):
                    yield from flat.shards(key, state, key)
        rank = dist.get_rank() if self._frozen else 0
        for name, parameter in self._frozen:
            if (length := stage_3_length(parameter, rank)) > 0:
                local = parameter.ds_tensor.detach().narrow(0, 0, length)
                box = Box((rank * parameter.partition_numel(),), (length,))
                yield Shard(f"{name}.{_FROZEN}", (parameter.ds_numel,), box, local, vars(parameter), "ds_tensor")

    def _is_sharded(self, flat: Flat, key: str, value: Any) -> bool:
        """Return whether optimizer state has one element per element of the parameters. Raises TypeError if neither
        that nor one number."""
        if not isinstance(value, torch.Tensor) or key == "step":
            return False
        if value.shape == flat.tensor.shape:
            return True
        if value.numel() > 1:
            raise TypeError(
                f"{type(self._basic).__qualname__} keeps {key!r} of shape {list(value.shape)} for "
                f"{flat.tensor.numel()} elements, which cannot be divided by parameters: use an elementwise optimizer, "
                "such as Adam or SGD"
            )
        return False

    def is_complete(self) -> bool:
        return all(self._basic.state.get(flat.tensor) for flat in self._flats)

    def create_missing(self, stored: Mapping[str, torch.dtype]) -> None:
        wanted: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
        for name, dtype in stored.items():
            parameter, _, key = name.rpartition(".")
            if key not in (_MASTER, _FROZEN):
                wanted[parameter][key] = dtype
        for flat in self._flats:
            # a rank that has only padding of a group takes the keys of all
            names = [piece.name for piece in flat.pieces] or list(wanted)
            keys = {key: dtype for name in names for key, dtype in wanted.get(name, {}).items()}
            state = self._basic.state[flat.tensor] if keys else {}
            for key in keys.keys() - state.keys():
                state[key] = torch.zeros_like(flat.tensor.detach(), dtype=keys[key])

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        state: dict[str, Any] = {"counters": {name: getattr(engine, name) for name in _COUNTERS}}
        if self._wrapped:
            state["groups"] = [group_options(group) for group in self._basic.param_groups]
            state["scalars"] = self._scalars()
            if (scaler := self._scaler()) is not None:
                numbers = {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
                state["scaler"] = numbers
        for name, autocast in self._autocast_scalers():
            state[name] = autocast.state_dict()
        if engine.random_ltd_enabled():
            state["random_ltd"] = engine.random_ltd_scheduler.state_dict()
        return state

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Load everything that is no shard. A collective under ZeRO-3, which gathers its persistent parameters."""
        engine = self._engine
        for name, value in stored["counters"].items():
            setattr(engine, name, value)
        if self._wrapped:
            for group, options in zip(self._basic.param_groups, stored["groups"], strict=True):
                load_options(group, options)
            self._load_scalars(stored["scalars"])
            if (scaler := self._scaler()) is not None:
                vars(scaler).update(stored.get("scaler", {}))
        for name, autocast in self._autocast_scalers():
            autocast.load_state_dict(stored[name])
        if engine.random_ltd_enabled():
            engine.random_ltd_scheduler.load_state_dict(stored["random_ltd"])
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            _update_stage_3_weights(engine.optimizer)

    def _scalars(self) -> list[dict[str, Any]]:
        """Return the optimizer state that is no shard, by parameter group: it is the same for all of a group."""
        found: list[dict[str, Any]] = [{} for _ in self._basic.param_groups]
        for flat in self._flats:
            state = self._basic.state.get(flat.tensor)
            if state and not found[flat.group]:
                found[flat.group] = {k: value for k, value in state.items() if not self._is_sharded(flat, k, value)}
        return found

    def _load_scalars(self, stored: Sequence[Mapping[str, Any]]) -> None:
        for flat in self._flats:
            group = self._basic.param_groups[flat.group]
            device = flat.tensor.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
            if scalars := stored[flat.group]:
                copied = map_tensors(dict(scalars), partial(torch.Tensor.to, device=device, copy=True))
                self._basic.state[flat.tensor].update(copied)

    def _scaler(self) -> Any:
        optimizer = self._engine.optimizer
        return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)

    def _autocast_scalers(self) -> Iterator[tuple[str, Any]]:
        inner = getattr(self._engine.optimizer, "torch_autocast_gradscaler", None)
        for name, scaler in (("autocast", inner), ("autocast_z0", self._engine.torch_autocast_z0_gradscaler)):
            if scaler is not None:
                yield name, scaler


def _update_stage_3_weights(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Round the master weights into the partitions of the model's, and gather parameters that stay whole."""
    pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    with torch.no_grad():
        for low, master in pairs:
            if low.data_ptr() != master.data_ptr():
                low.data.copy_(master.data)
    if whole := optimizer.persistent_parameters:
        whole[0].partition(whole)
        whole[0].all_gather(whole)


class _WithoutParameters(torch.nn.Module):
    """The children and buffers of a module as they are, without its parameters: ZeRO-3 leaves those empty."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name, child in module.named_children():
            self.add_module(name, _WithoutParameters(child))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise ValueError(f"a {type(module).__qualname__} has extra state, which is not stored under ZeRO-3")


# ---- for the training function


def tracked_objects(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the objects of an engine to track, by name, for a trainer that tracks further ones.

    Raises:
        TypeError: The engine's optimizer is of an unknown kind.
        ValueError: The configuration has state that would not be stored.
    """
    _refuse_unsupported(engine)
    state = EngineState(engine)
    module = _WithoutParameters(engine.module) if engine.zero_optimization_partition_weights() else engine.module
    objects: dict[str, Any] = {"model": module, "deepspeed": state}
    if not state.optimizers:
        objects["optimizer"] = state.basic
    if hasattr(engine.lr_scheduler, "state_dict"):
        objects["schedule"] = engine.lr_scheduler
    return objects


def track_engine(run: Run, engine: DeepSpeedEngine, **options: Any) -> None:
    """Track an engine, and restore it to the version that the generation agreed on.

    Args:
        run: The run of the training function.
        engine: What ``deepspeed.initialize`` returned first.
        options: Passed to ``run.track``: its options, and further objects by name.

    Raises:
        TypeError: The engine's optimizer is of an unknown kind.
        ValueError: The configuration has state that would not be stored.
    """
    objects = tracked_objects(engine)
    run.track(**objects, **options)
    work_alone(run, engine, save_checkpoint="checkpoint", save_16bit_model="saving the model")
    work_alone(run, engine.monitor, write_events="logging")
    wait_before_updates(run, objects["deepspeed"])


def wait_before_updates(run: Run, state: EngineState) -> None:
    """Have the engine's updates wait for the copy of the last step's state; ``track_engine`` calls it."""
    for optimizer in state.optimizers:
        optimizer.register_step_pre_hook(lambda *_: run.before_update())


def micro_batches(engine: DeepSpeedEngine, loader: Loader, step: int) -> Iterator[tuple[Any, float]]:
    """Yield the batches of an update, each with the weight to multiply its mean loss by.

    Batch n of the loader is micro-batch n of the run. The weight is 1 unless ranks have different numbers of samples.

    Args:
        engine: The engine; it determines how many batches an update has.
        loader: A loader made by ``run.loader``.
        step: The step, from 1.

    Raises:
        RuntimeError: The batches made no update: ``engine.step`` was not called after each ``engine.backward``.
    """
    count, before = int(engine.gradient_accumulation_steps()), engine.global_steps
    for number in range((step - 1) * count + 1, step * count + 1):
        yield loader.batch(number), loader.loss_weight(number)
    if engine.global_steps != before + 1:
        raise RuntimeError(
            f"the {count} micro-batches of step {step} made {engine.global_steps - before} updates instead of one: "
            "call engine.backward(loss * weight) and engine.step() for each"
        )
