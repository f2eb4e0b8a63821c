"""Observe gradients on their way from the backward pass through the collective, in the steps of an audit.

Two places let Everstep read them without a change to the model: the exchange of
`everstep_trainer.parallel.exchange` (``run.replicate``), and the reduce-scatter of ``fully_shard``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.parallel.exchange import observe_exchanges
from everstep_trainer.parallel.ordered_gradients import exchanges_of
from everstep_trainer.state.tracked_objects import as_list

log = logging.getLogger(__name__)

MAX_BUCKETS = 64
"""Most buckets of one step that a reader checks."""


class GradientReader:
    """Receives gradients while an audit is due, in the thread of their exchange; the base class ignores them."""

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        """Read this rank's gradients before they are added.

        Args:
            parameters: Those of the gradients; empty under ``fully_shard``.
            gradients: The gradients.
            sent: The same bytes.
            sizes: Elements of them that go to each rank.
        """

    def on_received(self, slices: torch.Tensor) -> None:
        """Read the slices that came from each rank. Not under ``fully_shard``, where they are not visible."""

    def on_sum(self, total: torch.Tensor) -> None:
        """Read this rank's slice of the sum over all ranks. Not under ``fully_shard``."""


class GradientTap:
    """The gradients of one generation's tracked models. Readers are called only between ``open`` and ``close``."""

    def __init__(self, objects: Iterable[object], world_size: int) -> None:
        self._open: list[GradientReader] = []
        self._undo: list[Callable[[], None]] = []
        roots = [each for item in objects for each in as_list(item) if isinstance(each, nn.Module)]
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self.replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        # Beside sharded modules, readers could not tell whose gradients they are shown.
        has_shards = any(isinstance(module, FSDPModule) for module in modules)
        is_ordered = all(map(exchanges_of, self.replicas))
        self._is_ordered = bool(self.replicas) and is_ordered and not has_shards
        self._sharded = [
            module for module in modules if isinstance(module, FSDPModule) and _can_observe(module, world_size)
        ]

    @property
    def sees_gradients(self) -> bool:
        """True if some gradients pass a place where they can be read."""
        return self._is_ordered or bool(self._sharded)

    @property
    def sees_sums(self) -> bool:
        """True if what each rank received and added can be read, too."""
        return self._is_ordered

    def open(self, reader: GradientReader) -> None:
        """Let ``reader`` read the gradients of the step that begins."""
        if reader in self._open:  # the step before had no update
            return
        if not self._open:
            if self._is_ordered:
                observe_exchanges(self)
            for module in self._sharded:
                self._undo.append(_observe_reduce_scatter(module, self))
        self._open.append(reader)

    def close(self, reader: GradientReader) -> None:
        """Stop showing gradients to ``reader``."""
        if reader not in self._open:
            return
        self._open.remove(reader)
        if not self._open:
            observe_exchanges(None)
            for undo in self._undo:
                undo()
            self._undo.clear()

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        for reader in self._open:
            reader.on_local(parameters, gradients, sent, sizes)

    def on_received(self, slices: torch.Tensor) -> None:
        for reader in self._open:
            reader.on_received(slices)

    def on_sum(self, total: torch.Tensor) -> None:
        for reader in self._open:
            reader.on_sum(total)


def _groups_of(module: FSDPModule) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


def _can_observe(module: FSDPModule, world_size: int) -> bool:
    """Return whether the module has one group of parameters, which is reduced over all ranks by torch's own way."""
    groups = _groups_of(module)
    return len(groups) == 1 and (
        type(groups[0]._reduce_scatter_comm).__name__ == "DefaultReduceScatter"
        and groups[0]._reduce_scatter_process_group.size() == world_size
    )


class _ObservedReduceScatter:
    """torch's own reduce-scatter of ``fully_shard``, with a look at its input."""

    def __init__(self, inner: Any, tap: GradientTap) -> None:
        self._inner, self._tap = inner, tap

    def allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        allocated: torch.Tensor = self._inner.allocate(*args, **options)
        return allocated

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **options: Any,
    ) -> Any:
        sizes = [input_tensor.numel() // group.size()] * group.size()
        self._tap.on_local((), [input_tensor], input_tensor, sizes)
        return self._inner(output_tensor, input_tensor, group, *args, **options)


def _observe_reduce_scatter(module: FSDPModule, tap: GradientTap) -> Callable[[], None]:
    (group,) = _groups_of(module)
    inner = group._reduce_scatter_comm
    group._reduce_scatter_comm = _ObservedReduceScatter(inner, tap)

    def undo() -> None:
        group._reduce_scatter_comm = inner

    return undo
