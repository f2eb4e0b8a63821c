"""Add the gradients of a replicated model in the order of ranks, beside the backward pass.

Gradients travel in buckets: each bucket is an all-to-all that gives each rank its slice of it, a sum of what the rank
received, in the order of ranks, and an exchange that returns the sums. Each element is added alone and in one order, so
the result depends neither on the buckets nor on the order in which gradients are ready. The traffic equals a ring's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.parallel.lane import Communicator, Lane, make_lane, slice_sizes

CHUNK = 32768
"""Elements of a slice that are added at once: what was received of them stays in a processor's cache, and torch starts
no further threads for so few."""


class ExchangeObserver(Protocol):
    """Reads gradients at the steps of their exchange, and changes nothing. Called in the thread of the exchange."""

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        """Read this rank's gradients before the exchange; of ``sent``, ``sizes[r]`` elements go to rank ``r``."""

    def on_received(self, slices: torch.Tensor) -> None:
        """Read what this rank received: row ``r`` came from rank ``r``."""

    def on_sum(self, total: torch.Tensor) -> None:
        """Read this rank's slice of the sum over all ranks."""


_observer: ExchangeObserver | None = None


def observe_exchanges(observer: ExchangeObserver | None) -> None:
    """Let ``observer`` read all exchanges of this process from now on; None: no observer."""
    global _observer  # DistributedDataParallel keeps the hook's state, which cannot be exchanged later
    _observer = observer


def bucket_indices(parameters: Sequence[torch.Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Return the parameters of each bucket, in the order in which buckets are exchanged.

    Args:
        parameters: In the order of their registration.
        limits: Bytes at which a bucket is cut: of the first bucket, the second one, ..., and of all others.

    Returns:
        Indices of parameters, those registered last first. A bucket has parameters of one dtype and device.
    """
    last_first = list(reversed(parameters))
    found, _ = _compute_bucket_assignment_by_size(last_first, list(limits), [False] * len(last_first))
    return [[len(last_first) - 1 - index for index in indices] for indices in found]


class LocalGradient(NamedTuple):
    """A gradient of this rank.

    Attributes:
        parameter: Its parameter.
        gradient: The gradient.
        values: Its memory, ``[n]``, which receives the mean over ranks.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    values: torch.Tensor


class _Bucket:
    """Gradients that are exchanged together; ``local``: those of the running pass, by the index of the parameter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.local: dict[int, LocalGradient] = {}

    def take(self) -> list[LocalGradient]:
        """Return the local gradients in the order of the bucket's parameters."""
        return [self.local[index] for index in range(self.count)]


class Exchange:
    """Adds the gradients of one replicated model over a group of ranks.

    Its buckets depend on the model alone, whatever buckets DistributedDataParallel has, and are exchanged in one order.
    A pass is complete when all gradients were submitted. Until then the exchange knows which buckets went, and where
    the local gradients of the others lie.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        limits: Sequence[int],
        on_wait: Callable[[float], object],
    ) -> None:
        """Make the exchange of a model. A collective.

        Args:
            parameters: The trained ones, on one device, in the order of their registration.
            group: The replicas; None: all ranks.
            limits: Bytes at which buckets are cut; see ``bucket_indices``.
            on_wait: Receives the seconds that the training thread waited for other ranks in a pass.
        """
        indices = bucket_indices(parameters, limits)
        self._buckets = [_Bucket(len(of_bucket)) for of_bucket in indices]
        self._places = {
            id(parameters[at]): (bucket, place)
            for bucket, of_bucket in zip(self._buckets, indices, strict=True)
            for place, at in enumerate(of_bucket)
        }
        self._next = 0  # the first bucket of the pass that was not exchanged
        self._lane: Lane = make_lane(group, parameters[0].device, CollectiveTimer(on_wait))
        self._memory = Memory(), Memory()  # a bucket's exchange begins while the sums of the one before are sent
        if parameters[0].device.type == "cpu":
            self._allocate_slices(parameters, indices)

    def __deepcopy__(self, memo: object) -> Exchange:
        return self  # a copied DistributedDataParallel registers no hook of its own

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # nor does one that torch.save has stored

    def submit(self, gradients: Sequence[LocalGradient]) -> bool:
        """Submit gradients of the running pass.

        Returns:
            Whether the pass is complete, so that ``wait`` must be called.

        Raises:
            RuntimeError: An earlier exchange failed.
        """
        places = [self._places[id(local.parameter)] for local in gradients]
        if any(place in bucket.local for bucket, place in places):
            self._begin_pass()  # the pass before was left by an error
        for (bucket, place), local in zip(places, gradients, strict=True):
            bucket.local[place] = local
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if len(bucket.local) < bucket.count:
                return False
            ranks, memory = (self._lane.rank, self._lane.world_size), self._memory[self._next % 2]
            self._lane.submit(partial(_exchange_bucket, bucket.take(), ranks, memory))
            self._next += 1
        return True

    def wait(self) -> None:
        """Wait until all submitted gradients are means. Raises what stopped the exchange, or Regroup."""
        self._lane.wait()
        self._begin_pass()

    def close(self) -> None:
        """End the exchange, whatever it waits for."""
        self._lane.close()

    def _allocate_slices(self, parameters: Sequence[torch.Tensor], indices: Sequence[Sequence[int]]) -> None:
        """Allocate the memory that the largest buckets need, in the training thread. After a regroup it gets pages that
        the last model has touched. A new thread would touch new ones, in a step that all ranks wait for."""
        ranks = self._lane.world_size
        for number, of_bucket in enumerate(indices):
            count = slice_sizes(sum(parameters[at].numel() for at in of_bucket), ranks)[0]
            self._memory[number % 2].get("slices", parameters[of_bucket[0]], count * ranks)

    def _begin_pass(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.local.clear()


class Memory:
    """Memory that the exchanges of a lane use one after another, so that its pages are touched once."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, use: str, like: torch.Tensor, count: int) -> torch.Tensor:
        """Return ``count`` elements with any content. They are reused at the next call for the same use."""
        key = use, like.dtype, like.device
        known = self._tensors.get(key)
        if known is None or known.numel() < count:
            known = self._tensors[key] = like.new_empty(count)
        return known[:count]


def _exchange_bucket(
    local: Sequence[LocalGradient], ranks: tuple[int, int], memory: Memory, communicator: Communicator
) -> Iterator[None]:
    """Replace the gradients of a bucket by their means over ranks. ``ranks``: this rank, and the number of all."""
    sizes = [one.values.numel() for one in local]
    order = _order_in_memory([one.values for one in local])
    if order is not None:
        local = [local[at] for at in order]
        flat = local[0].values.as_strided((sum(sizes),), (1,))
        gradients: Sequence[torch.Tensor] = [one.gradient for one in local]
    else:
        flat = torch.cat([one.values for one in local], out=memory.get("flat", local[0].values, sum(sizes)))
        gradients = torch.split(flat, sizes)
    wait = _begin_mean([one.parameter for one in local], gradients, flat, ranks, memory, communicator)
    yield
    wait()
    if order is None:
        for one, mean in zip(local, gradients, strict=True):
            one.values.copy_(mean)


def _order_in_memory(pieces: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the order of the pieces in memory if no gap is between them; None otherwise.

    DistributedDataParallel keeps its buckets in one order on all ranks, so all ranks answer alike.
    """
    begins = [piece.data_ptr() for piece in pieces]
    order = sorted(range(len(pieces)), key=begins.__getitem__)
    end, memory = begins[order[0]], pieces[order[0]].untyped_storage()
    for at in order:
        if begins[at] != end:
            return None
        end += pieces[at].numel() * pieces[at].element_size()
    return order if end <= memory.data_ptr() + memory.nbytes() else None


def _begin_mean(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    flat: torch.Tensor,
    ranks: tuple[int, int],
    memory: Memory,
    communicator: Communicator,
) -> Callable[[], None]:
    """Begin to replace ``flat`` ``[n]``, the memory of the gradients, by its mean over ranks; return a wait for it."""
    rank, world_size = ranks
    observer, sizes = _observer, slice_sizes(flat.numel(), world_size)
    own = [sizes[rank]] * world_size
    slices = memory.get("slices", flat, sum(own)).view(world_size, sizes[rank])
    if observer is not None:
        observer.on_local(parameters, gradients, flat, sizes)
    communicator.all_to_all(slices.view(-1), flat, own, sizes)
    if observer is not None:
        observer.on_received(slices)
    whole, is_wide = slices[0], flat.dtype is torch.float16
    if is_wide:  # a sum may leave float16's range, which ends at 65504, where the mean does not
        whole = memory.get("sum", flat.new_empty(0, dtype=torch.float32), sizes[rank]).copy_(whole)
    width = CHUNK if flat.device.type == "cpu" else flat.numel()
    for total, *others in zip(*(torch.split(row, width) for row in (whole, *slices[1:])), strict=True):
        for other in others:
            total += other
    if observer is not None:
        observer.on_sum(whole)
    whole /= world_size
    if is_wide:
        slices[0] = whole
    return communicator.all_gather(flat, slices, sizes)
