"""Add the gradients of parameters that ``fully_shard`` splits over the ranks, in exact mode.

``fully_shard`` accepts a custom reduce-scatter. The one here is an all-to-all: after each pass a rank has its slice of
every rank's gradients, and adds them along the tree (``summation.py``). Virtual ranks are interleaved, so those of one
pass are neighbours, and a rank holds at most log2(virtual ranks) sums of its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial as partial_of
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from everstep_trainer.parallel.exact import summation
from everstep_trainer.parallel.exact.summation import VirtualMean, Workspace
from everstep_trainer.parallel.lane import Communicator, all_gather

_SETTERS = (
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
)
MAX_PENDING = 2
"""Buffers of gradients that may wait for their exchange, each of the parameters that are communicated together."""
SUPPORTED_PARALLELISM = (
    "virtual ranks take replicas (DDP), fully_shard over all ranks, or HSDP, and neither tensor parallelism nor a "
    "pipeline. Go on without virtual_ranks"
)


class ScratchMemory:
    """Memory for unused output of fully_shard, shared by all modules."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor ``[count]``, zeros as long as nothing writes there."""
        known = self._memory.get((dtype, device))
        if known is None or known.numel() < count:
            known = self._memory[dtype, device] = torch.zeros(count, dtype=dtype, device=device)
        return known[:count]


class ShardedGradients:
    """Gradients of parameters that ``fully_shard`` communicates together; it uses this as its reduce-scatter. Sums have
    the wider dtype of parameters and reduction, and are rounded once. ``param_group``'s fields are private to torch
    2.13."""

    def __init__(
        self,
        module: FSDPModule,
        param_group: Any,
        mean: VirtualMean,
        workspace: Workspace,
        scratch: ScratchMemory,
        connect: Callable[[dist.ProcessGroup | None], Communicator | None],
    ) -> None:
        self._module, self._param_group = module, param_group
        self._mean, self._workspace, self._scratch = mean, workspace, scratch
        mesh = param_group.fsdp_params[0].sharded_param.device_mesh
        self._shards: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self._ranks = dist.get_process_group_ranks(self._shards)
        self._replicas: dist.ProcessGroup | None = mesh.get_group(0) if mesh.ndim == 2 else None
        self._rows = _rows(mesh.mesh, self._replicas, self._ranks)
        self._to_shards, self._to_replicas = connect(self._shards), connect(self._replicas)
        self._partials: list[summation.PartialSums[torch.Tensor]] = []
        self._spare: list[torch.Tensor] = []
        self._given: torch.Tensor | None = None
        self._round = self._call = 0
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # its base class is private
        module.set_reduce_scatter_unused_params(True, recurse=False)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of their gradients in fully_shard's buffer."""
        every = [known.sharded_param for known in self._param_group.fsdp_params]
        return [parameter for parameter in every if parameter.requires_grad]

    def begin_step(self) -> None:
        """Begin a step: existing gradients belong to the one before."""
        self._wait()
        self._module.set_requires_gradient_sync(True, recurse=False)
        self._module.set_requires_all_reduce(False, recurse=False)  # of replicas (HSDP), which is done here
        self._spare += [values for partial in self._partials for _, values in partial.parts]
        self._partials = []
        self._given, self._round, self._call = None, 0, 0
        self._drop()

    def collect(self, rank: int | None) -> None:
        """End a pass that all ranks have done, each for a virtual rank of its own."""
        self._round, self._call = self._round + 1, 0
        self._drop()

    def reduce(self) -> None:
        """Set the parameters' gradients to the mean over all virtual ranks. A collective."""
        self._wait()
        sizes = self._sizes()
        mine = self._total()
        values = mine if mine is not None else torch.zeros(sum(sizes), device=self._param_group.device)
        if mine is not None and self._replicas is not None and len(self._rows) > 1:
            whole = mine.new_empty(len(self._rows) * mine.numel())
            with self._mean.timer.measure(mine.device):
                all_gather(whole, mine, group=self._replicas)
            values = whole[: sum(sizes)]
        for parameter, part in zip(self.parameters, torch.split(values, sizes), strict=True):
            assert isinstance(parameter, DTensor)
            local = parameter.to_local().detach()
            gradient = part[: local.numel()].view(local.shape).to(local)
            parameter.grad = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate fully_shard's input, then its unused output; a single rank stops here and sends nothing."""
        (count,) = map(int, size)
        if self._given is None:
            self._given = torch.empty(count, dtype=dtype, device=device)
            return self._given
        given, self._given = self._given, None
        if len(self._ranks) == 1:
            self._collect(given)
        return self._scratch.get(count, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Take the input; called by fully_shard. The result is set after the step's last pass; see ``reduce``."""
        self._collect(input_tensor)

    def _collect(self, gradients: torch.Tensor) -> None:
        """Take gradients ``[ranks that share the parameters * n]``, a part for each of them."""
        if gradients.numel() != len(self._ranks) * sum(self._sizes()):
            raise ValueError("parameters were frozen or thawed between two passes of a step: exact mode needs the same")
        leaves = [self._leaves([rank]) for rank in self._ranks]
        covers = [summation.minimal_cover(self._mean.virtual_ranks, self._leaves(ranks)) for ranks in self._rows]
        job = partial_of(self._add_pass, gradients, leaves, covers, self._call)
        self._call += 1
        if self._mean.lane is None:
            for _ in job(None):
                pass
            return
        self._mean.lane.submit(job)
        self._mean.lane.wait_for_older(MAX_PENDING)

    def _add_pass(
        self,
        gradients: torch.Tensor,
        leaves: Sequence[Sequence[int]],
        covers: Sequence[tuple[summation.TreeNode, ...]],
        call: int,
        communicator: Communicator | None,
    ) -> Iterator[None]:
        """Add this rank's slice of the gradients of one pass; ``leaves``: the virtual ranks of each rank in it."""
        received = gradients
        if self._to_shards is not None:
            received = self._workspace.get("shards", gradients, gradients.numel())
            sizes = [gradients.numel() // len(self._ranks)] * len(self._ranks)
            self._to_shards.all_to_all(received, gradients, sizes, sizes)
        wider = torch.promote_types(gradients.dtype, self.parameters[0].dtype)
        values = received.view(len(self._ranks), -1).to(wider)
        partial = self._mean.new_partial_sums()
        for of_rank, own in zip(leaves, values, strict=True):
            for leaf in of_rank:
                partial.add((leaf, leaf + 1), own)
        parts = dict(partial.parts)
        if self._to_replicas is not None:
            parts = summation.exchange_slices(partial.parts, covers, values[0], self._workspace, self._to_replicas)
        self._keep(parts, call)
        yield

    def _keep(self, parts: dict[summation.TreeNode, torch.Tensor], call: int) -> None:
        """Add the parts to those of the same call in other passes: a module may be called several times in one pass."""
        if call == len(self._partials):
            self._partials.append(self._mean.new_partial_sums(self._add))
        for node, values in parts.items():
            own = self._spare.pop() if self._spare else torch.empty_like(values)
            self._partials[call].add(node, own.copy_(values))

    def _wait(self) -> None:
        if self._mean.lane is not None:
            self._mean.lane.wait()

    def _total(self) -> torch.Tensor | None:
        total: torch.Tensor | None = None
        for partial in self._partials:
            # a virtual rank that did not use the module counts as zero
            for leaf in _missing(partial, self._mean.virtual_ranks):
                partial.add((leaf, leaf + 1), torch.zeros_like(partial.parts[0][1]))
            ((_, values),) = partial.parts
            total = values if total is None else total.add_(values)
        return None if total is None else total.div_(self._mean.virtual_ranks)

    def _leaves(self, ranks: Sequence[int]) -> list[int]:
        """Return the virtual ranks that these ranks play in this pass; the last pass may have too few for all."""
        first = self._round * self._mean.world_size
        return [first + rank for rank in ranks if first + rank < self._mean.virtual_ranks]

    def _sizes(self) -> list[int]:
        """Return the size of each parameter's part of a slice: the most rows of a rank, or its even share."""
        found = []
        for parameter in self.parameters:
            assert isinstance(parameter, DTensor)
            placement, ways = parameter.placements[-1], len(self._ranks)
            assert isinstance(placement, Shard)
            dim = placement.dim
            found.append(-(-parameter.shape[dim] // ways) * (parameter.numel() // max(1, parameter.shape[dim])))
        return found

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._spare.append(right)
        return left.add_(right)


def find_sharded_gradients(model: nn.Module, mean: VirtualMean) -> list[ShardedGradients]:
    """Return one object per parameter group of ``fully_shard``. Raises TypeError or ValueError for an inexact one."""
    room, scratch, found = Workspace(), ScratchMemory(), []
    known: dict[dist.ProcessGroup, Communicator] = {}

    def connect(ranks: dist.ProcessGroup | None) -> Communicator | None:
        """Return connections between the ranks of a group; None where there is no other rank."""
        if ranks is None or ranks.size() == 1 or mean.lane is None:
            return None
        if ranks not in known:
            known[ranks] = mean.lane.connect(ranks)
        return known[ranks]

    for name, module, group in _groups(model):
        _require_data_parallelism(name, group, mean.world_size)
        _require_mean(name, group)
        if any(known.sharded_param.requires_grad for known in group.fsdp_params):
            found.append(ShardedGradients(module, group, mean, room, scratch, connect))
    return found


def _groups(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if any(not hasattr(module, setter) for setter in _SETTERS):
            raise TypeError("virtual ranks under fully_shard need torch 2.13 or later: go on without virtual_ranks")
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups
        if len(groups) > 1:
            raise TypeError(f"{name or 'the model'} has parameters on several meshes: go on without virtual_ranks")
        if groups and id(state) not in seen:
            seen.add(id(state))
            yield name or "the model", module, groups[0]


def _require_data_parallelism(name: str, group: Any, world_size: int) -> None:
    for known in group.fsdp_params:
        mesh, placements = known.sharded_param.device_mesh, known.sharded_param.placements
        kinds = tuple(map(type, placements))
        if kinds not in ((Shard,), (Replicate, Shard)) or mesh.size() != world_size:
            raise TypeError(
                f"{name} is laid out as {placements} over {mesh.size()} of {world_size} ranks: {SUPPORTED_PARALLELISM}"
            )


def _require_mean(name: str, group: Any) -> None:
    if group.gradient_divide_factor is not None or group._all_reduce_hook is not None:
        raise ValueError(
            f"{name} has a gradient divide factor or an all-reduce hook: with virtual ranks gradients are the mean "
            "over these. Scale the loss instead"
        )
    for known in group.fsdp_params:
        narrow, computed = known.sharded_param.dtype, group.mp_policy.param_dtype
        if computed is not None and torch.promote_types(narrow, computed) != narrow:
            raise ValueError(
                f"{name} computes in {computed}, and its parameters are {narrow}, which would round the gradients of "
                "virtual ranks: keep parameters in the wider of the two"
            )


def _rows(mesh: torch.Tensor, replicas: dist.ProcessGroup | None, own_ranks: list[int]) -> list[list[int]]:
    """Return the ranks that share one replica's parameters, for each replica, in the order of ``replicas``."""
    if replicas is None:
        return [own_ranks]
    rows: list[list[int]] = mesh.tolist()
    return [row for rank in dist.get_process_group_ranks(replicas) for row in rows if rank in row]


def _missing(partial: summation.PartialSums[torch.Tensor], leaves: int) -> list[int]:
    edges = [0, *(edge for node, _ in partial.parts for edge in node), leaves]
    return [leaf for end, start in list(pairwise(edges))[::2] for leaf in range(end, start)]
