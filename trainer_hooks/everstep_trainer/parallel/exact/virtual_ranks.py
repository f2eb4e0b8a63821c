"""Run in exact mode: compute the gradients of virtual ranks with the same bits on any number of ranks.

Each rank computes its virtual ranks one after another: full forward and backward passes with the same samples and
random numbers on whichever rank. Their gradients are added along one tree (``summation.py``, ``sharded.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from everstep_trainer.data.loader import iter_batches
from everstep_trainer.data.rng import ALL_REPLICAS, seed_step
from everstep_trainer.data.sampler import Sampler, StepPart
from everstep_trainer.parallel.exact.sharded import SUPPORTED_PARALLELISM, ShardedGradients, find_sharded_gradients
from everstep_trainer.parallel.exact.summation import VirtualMean, Workspace
from everstep_trainer.parallel.ordered_gradients import refuse_sparse
from everstep_trainer.state.tracked_objects import as_list
from everstep_trainer.state.untracked_state import broadcast_first_rank, replicated_tensors


class VirtualGradients:
    """Gradients of parameters of one dtype and device, concatenated in flat buffers ``[n]`` that are reused."""

    def __init__(self, parameters: list[nn.Parameter], mean: VirtualMean) -> None:
        self._parameters, self._mean = parameters, mean
        self._workspace = Workspace()
        self._spare: list[torch.Tensor] = []
        self._partial = mean.new_partial_sums(self._add)

    def begin_step(self) -> None:
        """Begin a step: existing gradients belong to the one before."""
        self._spare += [values for _, values in self._partial.parts]
        self._partial = self._mean.new_partial_sums(self._add)
        for parameter in self._parameters:
            parameter.grad = None

    def collect(self, rank: int | None) -> None:
        """Take the gradients of a virtual rank, zeros for unused parameters; None: drop those of a repeated pass."""
        if rank is not None:
            taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            flat = self._spare.pop() if self._spare else taken[0].new_empty(sum(p.numel() for p in self._parameters))
            torch.cat([gradient.reshape(-1) for gradient in taken], out=flat)
            self._partial.add((rank, rank + 1), flat)
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Set the parameters' gradients to the mean over all virtual ranks. A collective."""
        sizes = [parameter.numel() for parameter in self._parameters]
        values_of_all = torch.split(self._mean.mean(self._partial, self._workspace), sizes)
        for parameter, values in zip(self._parameters, values_of_all, strict=True):
            parameter.grad = values.view_as(parameter)

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._spare.append(right)
        return left.add_(right)


class VirtualReplicas:
    """The module's gradients in exact mode. Raises ValueError or TypeError, by name, for parts that cannot be exact."""

    def __init__(self, module: nn.Module, mean: VirtualMean, *, equal_already: bool) -> None:
        _refuse_running_statistics(module)
        refuse_sparse(module, "be added over virtual ranks: take sparse=False")
        _refuse_nondeterminism(module)
        self._module, self._mean = module, mean
        self._shards = find_sharded_gradients(module, mean)
        self.is_sharded = bool(self._shards)
        _refuse_other_shards(module, self._shards)
        self._constant_buffers: dict[str, tuple[torch.Tensor, int]] = {}
        self._arrange()
        if dist.is_initialized() and not equal_already:
            broadcast_first_rank(list(replicated_tensors(module)))

    def _arrange(self) -> None:
        """Make buffers for the parameters that are trained now. A collective."""
        self._trained = _trained(self._module)
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self._trained:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        whole = [VirtualGradients(parameters, self._mean) for parameters in by_kind.values()]
        self._gradients: list[VirtualGradients | ShardedGradients] = [*whole, *self._shards]
        if dist.is_initialized():
            _refuse_differences(self._mean.virtual_ranks, [p for p in self._module.parameters() if p.requires_grad])

    def begin_step(self) -> None:
        """Begin a step, before its first virtual rank. Parameters may have been frozen or thawed, on all ranks."""
        if [*map(id, _trained(self._module))] != [*map(id, self._trained)]:
            for parameter in self._trained:
                parameter.grad = None
            self._arrange()
        self._constant_buffers = {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}
        for gradients in self._gradients:
            gradients.begin_step()

    def collect(self, rank: int | None) -> None:
        """Take the gradients after the backward pass of a virtual rank; None: after a repeated pass."""
        self._refuse_changed_buffers()
        for gradients in self._gradients:
            gradients.collect(rank)

    def reduce(self) -> None:
        """Compute the gradients of the step after the last pass. A collective."""
        for gradients in self._gradients:
            gradients.reduce()

    def _refuse_changed_buffers(self) -> None:
        for name, buffer in self._module.named_buffers():
            before, version = self._constant_buffers.get(name, (None, 0))
            if buffer is not before or buffer._version != version:
                raise ValueError(
                    f"the buffer {name} changes in the forward pass, so it depends on how virtual ranks are assigned "
                    "to ranks, which exact mode does not support: freeze it, or go on without virtual_ranks"
                )


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats and part.training:
            raise ValueError(
                f"{name or 'the model'} is a {type(part).__name__} with running statistics, which depend on how "
                "virtual ranks are assigned to ranks; exact mode does not support them. Take GroupNorm or LayerNorm, "
                "track_running_stats=False, or put that module in eval()"
            )


def _refuse_other_shards(module: nn.Module, shards: Sequence[ShardedGradients]) -> None:
    known = {parameter for gradients in shards for parameter in gradients.parameters}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter not in known:
            raise TypeError(f"{name} is a DTensor that fully_shard did not make: {SUPPORTED_PARALLELISM}")


def _refuse_nondeterminism(module: nn.Module) -> None:
    on_gpu = any(parameter.is_cuda for parameter in module.parameters())
    if on_gpu and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "exact mode on a GPU needs kernels that add in one order: call torch.use_deterministic_algorithms(True) "
            "before run.replicate, with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )


def _refuse_differences(virtual_ranks: int, parameters: list[nn.Parameter]) -> None:
    """Raise ValueError if ranks differ, including in their number of threads, on which a CPU's sums depend."""
    device = parameters[0].device if parameters else torch.device("cpu")
    own = torch.tensor([virtual_ranks, torch.get_num_threads(), sum(p.numel() for p in parameters)], device=device)
    of_all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, own)
    for place, label in enumerate(("virtual ranks", "threads (torch.set_num_threads)", "trained parameters")):
        found = [int(values[place]) for values in of_all_ranks]
        if len(set(found)) > 1:
            raise ValueError(f"ranks differ in the number of {label}: {found}. Exact mode needs them equal")


# ---- exact mode: virtual ranks of one run and generation

_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch that use several elements at a time, and so depend on a rank's part of a parameter."""


class ExactMode:
    """The virtual ranks of one run and generation."""

    def __init__(self, mean: VirtualMean) -> None:
        self.mean = mean
        self._begun = self._is_complete = False
        self._models: list[VirtualReplicas] = []
        self._sharded = False

    def add_model(self, model: nn.Module, *, equal_already: bool) -> None:
        """Add a model; see ``Run.replicate``. A collective."""
        replicas = VirtualReplicas(model, self.mean, equal_already=equal_already)
        if replicas.is_sharded:
            self._sharded = True
            self.mean.interleave_ranks()
        self._models.append(replicas)

    def close(self) -> None:
        """End the exchange, whatever it waits for."""
        if self.mean.lane is not None:
            self.mean.lane.close()

    def parts(self, sampler: Sampler, step: int, seed: int) -> Iterator[StepPart]:
        """Yield the parts of a step; see ``Run.parts``. Passes over shards involve all ranks: some repeat one."""
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
        self._is_complete = True

    def step_finished(self) -> None:
        """Raise RuntimeError if the step's gradients are not those of its virtual ranks."""
        begun, complete = self._begun, self._is_complete
        self._begun = self._is_complete = False
        if begun and not complete:
            raise RuntimeError("the loop over run.parts was left before its end, so this step had no gradients")
        if not complete:
            raise RuntimeError(
                "a model of this run has virtual_ranks, but this step did not use run.parts, so each rank would train "
                "alone: compute the step in `for part in run.parts(sampler, step)`"
            )

    def require_elementwise(self, tracked: Iterable[object]) -> None:
        """Raise ValueError for an optimizer whose results depend on how its parameters are sharded."""
        every = [item for some in tracked for item in as_list(some) if isinstance(item, torch.optim.Optimizer)]
        for optimizer in every if self._sharded else ():
            name = type(optimizer).__name__
            if name in _NOT_ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim"):
                raise ValueError(
                    f"{name} needs the full parameter, of which a rank has a part: exact mode under fully_shard "
                    "supports elementwise optimizers, such as AdamW or SGD"
                )
            for group in optimizer.param_groups:
                if group.get("fused") and any(p.device.type == "cpu" for p in group["params"]):
                    raise ValueError(
                        f"the fused {name} on a CPU rounds a shard's last elements differently: exact mode under "
                        "fully_shard needs fused=False"
                    )
