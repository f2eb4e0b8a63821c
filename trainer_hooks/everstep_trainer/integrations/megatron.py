"""Train with Megatron-core inside a training function, with the shards of TP, PP and optimizer kept after every step.

Example::

    def train(run):
        initialize_megatron(run, tensor_model_parallel_size=2)
        model = DistributedDataParallel(config, ddp_config, GPTModel(config, spec, ...))
        optimizer = get_megatron_optimizer(optimizer_config, [model])
        loader = run.loader(dataset, global_batch=32, seed=1)
        track_megatron(run, [model], optimizer)
        for step in seeded_steps(run, until=10_000, seed=1):
            model.zero_grad_buffer()
            forward_backward(data_iterator=micro_batches(loader.batch(step)), model=model, **shapes)
            optimizer.step()

Megatron's own ``sharded_state_dict`` says which part of which whole tensor a parameter is. State is stored by these
names, so a version restores at another number of data-parallel ranks, and in other tensor- and pipeline-parallel sizes.

The private parts of Megatron-core used here were read in version 0.16.1.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing, num_microbatches_calculator, parallel_state, rerun_state_machine
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.tensor_parallel import random as tensor_parallel_random

from everstep.layout.manifests import Box, Extent
from everstep_trainer.data.rng import seed_step, stream_seed
from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.run import Run
from everstep_trainer.state.optimizer_state import map_tensors
from everstep_trainer.state.python_state import group_options, load_options
from everstep_trainer.state.sharded_state import Shard, ShardedState

# ---- what Megatron keeps for the whole process

_GROUP_VARIABLE = re.compile(r"_[A-Z][A-Z_]*")


def reset_process_state() -> None:
    """Drop Megatron's process-wide state of the previous generation: groups, buffers, counters, random streams.

    ``destroy_model_parallel`` leaves some groups and ranks behind, so all variables of ``parallel_state`` are reset.
    """
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if _GROUP_VARIABLE.fullmatch(name):
            setattr(parallel_state, name, {} if isinstance(value, dict) else None)
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    tensor_parallel_random.initialize_rng_tracker(force_reset=True)


def initialize_megatron(run: Run, **sizes: Any) -> None:
    """Make Megatron's groups for this generation, and declare its replicas of the model. A collective.

    Call it first in the training function, instead of ``parallel_state.initialize_model_parallel``. Ranks in
    ``dist_checkpointing.save`` are not taken for hung from then on.

    Args:
        run: The run of the training function.
        sizes: Passed to ``initialize_model_parallel``, such as ``tensor_model_parallel_size``.

    Raises:
        RuntimeError: Megatron cannot divide this generation's ranks into such sizes.
    """
    reset_process_state()
    work_alone(run, dist_checkpointing, save="checkpoint")
    parallel_state.initialize_model_parallel(**sizes)
    if run.device.type == "cpu":  # the tracker has states of CUDA generators, so on a CPU there is nothing to track
        tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    run.data_parallel(
        (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
    )


def seeded_steps(run: Run, until: int, *, seed: int = 0) -> Iterator[int]:
    """Yield the steps still to do, as ``run.steps``, and seed Megatron's trackers of random states before each.

    Random numbers then depend on (seed, step, replica, stage, tensor-parallel rank), not on earlier failures.

    Args:
        run: The run of the training function.
        until: The last step.
        seed: Seed of the random streams.
    """
    replica, stage = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    for step in run.steps(until, seed=seed):
        if run.device.type == "cuda":
            value = stream_seed(seed, step, replica, stage) % (1 << 31)
            tensor_parallel_random.model_parallel_cuda_manual_seed(value)
            seed_step(seed, step, replica, stage)
        yield step


# ---- parameters as boxes of whole tensors


def flat_boxes(size: Extent, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``end`` of a flattened tensor form, in their order in memory.

    Args:
        size: The tensor's size.
        start: The first element.
        end: One past the last element.
    """
    if start >= end:
        return
    if len(size) < 2:
        yield Box((start,), (end - start,)) if size else Box((), ())
        return
    inner = math.prod(size[1:])
    first, last = -(-start // inner), end // inner  # the whole rows
    if first > last:
        yield from _in_row(last, size, start, end)
        return
    yield from _in_row(first - 1, size, start, first * inner)
    if first < last:
        yield Box((first, *(0,) * (len(size) - 1)), (last - first, *size[1:]))
    yield from _in_row(last, size, last * inner, end)


def _in_row(row: int, size: Extent, start: int, end: int) -> Iterator[Box]:
    before = row * math.prod(size[1:])
    for box in flat_boxes(size[1:], start - before, end - before):
        yield Box((row, *box.offset), (1, *box.size))


class _ParameterBox(NamedTuple):
    """The elements of a flattened parameter from ``start`` on: the box at ``offset`` of a whole tensor."""

    name: str
    shape: Extent  # of the whole tensor
    offset: Extent
    size: Extent
    start: int


class _Placed(NamedTuple):
    """A parameter or buffer of a module, where it is found, and its pieces."""

    tensor: torch.Tensor
    container: Mapping[str, torch.Tensor | None]
    key: str
    pieces: tuple[_ParameterBox, ...]

    def shards(self, tensor: torch.Tensor, start: int, suffix: str, container: Any, key: Any) -> Iterator[Shard]:
        """Yield the shards of ``container[key]``, which belongs to the elements from ``start`` on."""
        flat, end = tensor.detach().view(-1), start + tensor.numel()
        for piece in self.pieces:
            low, high = max(start, piece.start), min(end, piece.start + math.prod(piece.size))
            at = low - start
            for box in flat_boxes(piece.size, low - piece.start, high - piece.start):
                local = flat.narrow(0, at, box.volume).view(box.size)
                at += box.volume
                whole = Box(tuple(map(sum, zip(piece.offset, box.offset, strict=True))), box.size)
                yield Shard(piece.name + suffix, piece.shape, whole, local, container, key)


def _places(chunks: Sequence[Any]) -> dict[int, _Placed]:
    """Return the parameters and stored buffers of model chunks by identity. Raises TypeError if one is not stored."""
    found: dict[int, _Placed] = {}
    for chunk in chunks:
        while hasattr(chunk, "module"):  # the wrappers of data parallelism and precision add to the names
            chunk = chunk.module
        holders = {
            id(tensor): (inside, key)
            for module in chunk.modules()
            for inside in (module._parameters, module._buffers)
            for key, tensor in inside.items()
            if tensor is not None
        }
        for part in nested_values(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})):
            if not isinstance(part, ShardedTensor | ShardedTensorFactory):
                continue  # objects of Transformer Engine, which are empty without FP8
            if id(part.data) not in holders:
                raise TypeError(f"{part.key} is no parameter or buffer of the model itself: FSDP is not supported")
            found[id(part.data)] = _Placed(part.data, *holders[id(part.data)], tuple(_pieces(part)))
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in found:
                raise TypeError(f"{name} is missing in the model's sharded_state_dict, and would not be stored")
    return found


def _pieces(part: Any) -> Iterator[_ParameterBox]:
    """Yield the pieces of a parameter; a factory divides it, as the two halves of a gated layer."""
    whole = part.data
    for cut in nested_values(part.build()) if isinstance(part, ShardedTensorFactory) else [part]:
        ahead, rest = divmod(cut.data.data_ptr() - whole.data_ptr(), whole.itemsize)
        if rest or not cut.data.is_contiguous() or not 0 <= ahead <= whole.numel() - cut.data.numel():
            raise TypeError(f"{cut.key} is stored in another form than it has in memory, which is not supported")
        size = (*(1,) * cut.prepend_axis_num, *cut.local_shape)
        yield _ParameterBox(cut.key, tuple(cut.global_shape), tuple(cut.global_offset), size, ahead)


# ---- where optimizers have a parameter's master weights and state


class _Trained(NamedTuple):
    """Elements of a parameter from ``start`` on that an optimizer updates in the tensor ``holder[at]``."""

    parameter: torch.Tensor
    start: int
    holder: Sequence[torch.Tensor]
    at: int
    is_master: bool  # a copy in float32; otherwise the parameter itself, or a view of it

    @property
    def tensor(self) -> torch.Tensor:
        return self.holder[self.at]


def _pairs(
    parameters: Sequence[Sequence[Any]], tensors: Sequence[list[Any]], start: Callable[[Any], int], is_master: bool
) -> Iterator[_Trained]:
    for group, updated in zip(parameters, tensors, strict=True):
        for at, parameter in enumerate(group):
            yield _Trained(parameter, start(parameter), updated, at, is_master)


def _of_distributed(optimizer: Any) -> Iterator[_Trained]:
    def start(parameter: torch.Tensor) -> int:
        return int(optimizer._get_model_param_range_map(parameter)["param"].start)

    yield from _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, start, False)
    yield from _pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, start, True)


def _of_float16(optimizer: Any) -> Iterator[_Trained]:
    yield from _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups, lambda _: 0, True)
    yield from _pairs(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, lambda _: 0, False)


def _of_torch(optimizer: Any) -> Iterator[_Trained]:
    groups = [group["params"] for group in optimizer.param_groups]
    yield from _pairs(groups, groups, lambda _: 0, False)


_LAYOUTS: dict[type, Callable[[Any], Iterator[_Trained]]] = {
    DistributedOptimizer: _of_distributed,
    Float16OptimizerWithFloat16Params: _of_float16,
    FP32Optimizer: _of_torch,
}


class _Updates:
    """An optimizer of the chain: torch's own, the elements that it updates, and the loss scaler around it."""

    def __init__(self, optimizer: Any) -> None:
        is_torch = isinstance(optimizer, torch.optim.Optimizer)
        if not is_torch and type(optimizer) not in _LAYOUTS:
            raise TypeError(f"the layout of a {type(optimizer).__qualname__} is not known: use Adam or SGD")
        self.basic: Any = optimizer if is_torch else optimizer.optimizer
        if not isinstance(self.basic, torch.optim.Optimizer) or hasattr(self.basic, "sub_optimizers"):
            raise TypeError(f"a {type(self.basic).__qualname__} keeps its state elsewhere: leave out CPU offload")
        self.scaler = getattr(optimizer, "grad_scaler", None)
        self.trained = list((_of_torch if is_torch else _LAYOUTS[type(optimizer)])(optimizer))

    def is_sharded(self, one: _Trained, key: str, value: Any) -> bool:
        """Return whether state has one element per element of the tensor. Raises TypeError if neither that nor one
        number."""
        if not isinstance(value, torch.Tensor) or key == "step":
            return False
        if value.shape == one.tensor.shape:
            return True
        if value.numel() > 1:
            raise TypeError(f"{type(self.basic).__qualname__} keeps {key!r} of shape {list(value.shape)}: use Adam")
        return False

    def scalars(self) -> dict[str, Any]:
        """Return the state that is no shard: the same for all parameters, which are updated together."""
        for shard in self.trained:
            if state := self.basic.state.get(shard.tensor):
                return {key: value for key, value in state.items() if not self.is_sharded(shard, key, value)}
        return {}


def _chain(optimizer: Any) -> list[Any]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


# ---- the state of chunks and optimizer

_MASTER = "master"  # key of shards that are no optimizer state


class MegatronState(ShardedState):
    """Parameters and buffers of model chunks, and master weights, state, options and loss scale of their optimizer."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        _refuse_unsupported(chunks, optimizer)
        self._places = _places(chunks)
        self._updates = [_Updates(each) for each in _chain(optimizer) if not getattr(each, "is_stub_optimizer", False)]

    @property
    def optimizers(self) -> Collection[torch.optim.Optimizer]:
        return [each.basic for each in self._updates]

    def shards(self) -> Iterator[Shard]:
        for placed in self._places.values():
            yield from placed.shards(placed.tensor, 0, "", placed.container, placed.key)
        for updates in self._updates:
            for shard in updates.trained:
                placed = self._places[id(shard.parameter)]
                if shard.is_master:
                    yield from placed.shards(shard.tensor, shard.start, f".{_MASTER}", shard.holder, shard.at)
                state = updates.basic.state.get(shard.tensor, {})
                for key, value in state.items():
                    if updates.is_sharded(shard, key, value):
                        yield from placed.shards(value, shard.start, f".{key}", state, key)

    def is_complete(self) -> bool:
        return all(each.basic.state.get(shard.tensor) for each in self._updates for shard in each.trained)

    def create_missing(self, stored: Mapping[str, torch.dtype]) -> None:
        names = {piece.name for placed in self._places.values() for piece in placed.pieces}
        wanted: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
        for name, dtype in stored.items():
            parameter, _, key = name.rpartition(".")
            if parameter in names and key != _MASTER:
                wanted[parameter][key] = dtype
        for updates in self._updates:
            for shard in updates.trained:
                first, *_ = self._places[id(shard.parameter)].pieces
                for key, dtype in wanted.get(first.name, {}).items():
                    state = updates.basic.state[shard.tensor]
                    if key not in state:
                        state[key] = torch.zeros_like(shard.tensor.detach(), dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [
                {
                    "groups": [group_options(group) for group in each.basic.param_groups],
                    "scalars": each.scalars(),
                    "scaler": each.scaler.state_dict() if each.scaler else {},
                }
                for each in self._updates
            ]
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        for each, saved in zip(self._updates, stored["optimizers"], strict=True):
            for group, options in zip(each.basic.param_groups, saved["groups"], strict=True):
                load_options(group, options)
            in_group = {id(p): group for group in each.basic.param_groups for p in group["params"]}
            for shard in each.trained if saved["scalars"] else ():
                group = in_group[id(shard.tensor)]
                on_device = group.get("capturable") or group.get("fused")
                device = shard.tensor.device if on_device else torch.device("cpu")
                copied = partial(torch.Tensor.to, device=device, copy=True)
                each.basic.state[shard.tensor].update(map_tensors(dict(saved["scalars"]), copied))
            if each.scaler:
                each.scaler.load_state_dict(saved["scaler"])


def _refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise ValueError for a configuration whose state is not stored completely."""
    refused = dict[str, bool]()
    for chunk in chunks:
        model, ddp = chunk.config, getattr(chunk, "ddp_config", None)
        refused |= {
            "FP8 or FP4 parameters": bool(getattr(model, "fp8", None) or getattr(model, "fp4", None)),
            "mixture of experts": bool(getattr(model, "num_moe_experts", None)),
            "Megatron FSDP": bool(getattr(ddp, "use_megatron_fsdp", False)),
            # parameters would be gathered in the next forward pass, after the snapshot
            "overlap_param_gather": bool(getattr(ddp, "overlap_param_gather", False)),
        }
    for each in _chain(optimizer):
        config = getattr(each, "config", None)
        refused |= {
            "use_precision_aware_optimizer": bool(getattr(config, "use_precision_aware_optimizer", False)),
            "optimizer_cpu_offload": bool(getattr(config, "optimizer_cpu_offload", False)),
        }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ValueError(f"Everstep does not store the state of a Megatron model with {', '.join(names)}")


# ---- for the training function


def track_megatron(run: Run, chunks: Sequence[Any], optimizer: Any, schedule: Any = None, **options: Any) -> None:
    """Track model chunks, optimizer and schedule, and restore them to the version that the generation agreed on.

    Args:
        run: The run of the training function.
        chunks: The model chunks of this rank, wrapped in Megatron's DistributedDataParallel or not.
        optimizer: What ``get_megatron_optimizer`` returned, or an optimizer of torch over the chunks' parameters.
        schedule: Megatron's ``OptimizerParamScheduler``, if there is one.
        options: Passed to ``run.track``: its options, and further objects by name.

    Raises:
        TypeError: The optimizer is of an unknown kind.
        ValueError: The configuration has state that would not be stored.
    """
    state = MegatronState(chunks, optimizer)
    if schedule is not None:
        options["schedule"] = schedule
    run.track(megatron=state, **options)
    for basic in state.optimizers:
        basic.register_step_pre_hook(lambda *_: run.before_update())
