"""Compare the optimizer state of ranks that is taken to be equal, before the first version of a plan counts.

Plain tensors of optimizer state are equal under DDP. Where a script divides the updates among ranks (Muon, ZeRO-1 made
by hand), each rank's are its own, and one rank's must not replace another's. The comparison costs one pass over this
state for each plan.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch._C._distributed_c10d import Store
from torch.distributed.tensor import DTensor

from everstep.clock import Clock
from everstep.errors import Unavailable
from everstep_trainer.digests.digest import tensor_digest, to_hex
from everstep_trainer.digests.piece_digests import separate_digests
from everstep_trainer.slots.layout_exchange import decode_value, poll_values, put_value
from everstep_trainer.state.layout import Sharing, content_digest
from everstep_trainer.state.tensors import TrackedTensor, list_names

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""Longest wait for the other ranks, which copy the same step; without them nothing is compared under this plan."""
MAX_SHOWN = 3


class _MomentDigests(msgspec.Struct, frozen=True):
    """One rank's digests by name, after a step."""

    step: int
    by_name: dict[str, str]


@dataclass(eq=False)
class MomentComparison:
    """One rank's part in one generation; for the copier thread.

    ``_equal``: Names of tensors that were found equal, in this generation or an earlier one of this process.
    """

    _store: Store
    _rank: int
    _world: int
    _clock: Clock
    _stop: threading.Event
    _is_over: Callable[[], bool]
    _log_fields: Mapping[str, object]
    _equal: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._compared_round = -1

    @property
    def has_begun(self) -> bool:
        """Return whether the first plan's state was compared, or needs not to be."""
        return self._world == 1 or self._compared_round >= 0

    def is_due(self, round_number: int) -> bool:
        """Return whether the state is to be compared under the plan of this round."""
        return self._world > 1 and round_number > self._compared_round

    def are_known_equal(self, tensors: Sequence[TrackedTensor]) -> bool:
        """Return whether other ranks are known to hold the same optimizer state; from any thread."""
        return self._world == 1 or all(tensor.name in self._equal for tensor in compared_moments(tensors))

    def differing(self, round_number: int, step: int, digests: Mapping[str, str]) -> frozenset[str] | None:
        """Return the names of tensors that differ between ranks after ``step``, on all ranks alike; once per plan.

        None: the generation ended before all ranks had published theirs.
        """
        self._compared_round = round_number
        body = msgspec.msgpack.encode(_MomentDigests(step, dict(digests)))
        mine, prefix = content_digest(body), f"moments/{round_number}"
        try:
            if not self._store.check([f"{prefix}/body/{mine}"]):
                put_value(self._store, f"{prefix}/body/{mine}", _MomentDigests(step, dict(digests)))
            self._store.set(f"{prefix}/rank/{self._rank}", mine)
            published = self._poll([f"{prefix}/rank/{rank}" for rank in range(self._world)])
            others = sorted({each.decode() for each in published} - {mine})
            bodies = [decode_value(each, _MomentDigests) for each in self._poll([f"{prefix}/body/{o}" for o in others])]
        except Unavailable:
            log.info("optimizer state was not compared between ranks after step %d", step, extra=dict(self._log_fields))
            return None if self._stop.is_set() or self._is_over() else frozenset()
        found: dict[str, set[str]] = defaultdict(set)
        for each in (_MomentDigests(step, dict(digests)), *bodies):
            if each.step != step:  # ranks store other steps first, so that nothing can be compared
                return frozenset()
            for name, digest in each.by_name.items():
                found[name].add(digest)
        names = frozenset(name for name, values in found.items() if len(values) > 1)
        self._equal |= found.keys() - names
        if names and self._rank == 0:
            self._warn(sorted(names), step)
        return names

    def _poll(self, keys: list[str]) -> list[bytes]:
        return poll_values(
            self._store, keys, stop=self._stop, clock=self._clock, timeout_s=WAIT_S, is_superseded=self._is_over
        )

    def _warn(self, names: Sequence[str], step: int) -> None:
        log.warning(
            "%s differ between ranks after step %d, so from now on each rank's are stored and return to the same rank. "
            "Another number of ranks cannot restore them: divide state by fully_shard or in DTensors, or leave it out "
            "by run.track(exclude=[...]), so that it begins anew after a loss",
            list_names(names, MAX_SHOWN),
            step,
            extra=dict(self._log_fields),
        )


def compared_moments(tensors: Sequence[TrackedTensor]) -> list[TrackedTensor]:
    """Return the optimizer state in plain tensors that is taken to be equal on all ranks."""
    return [
        tensor
        for tensor in tensors
        if tensor.is_moment and tensor.sharing is Sharing.EQUAL and not isinstance(tensor.original, DTensor)
    ]


def moment_digests(tensors: Sequence[TrackedTensor]) -> dict[str, str]:
    """Return digests of ``compared_moments``. Waits for GPUs."""
    plain = compared_moments(tensors)
    host = [tensor for tensor in plain if not tensor.local.is_cuda]
    found = dict(zip((t.name for t in host), separate_digests([t.local for t in host]).tolist(), strict=True))
    digests = {name: f"{value & (1 << 64) - 1:016x}" for name, value in found.items()}
    with torch.no_grad():
        return digests | {t.name: to_hex(tensor_digest(t.local)) for t in plain if t.local.is_cuda}
