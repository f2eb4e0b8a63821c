"""Compare the norms of each rank's gradients with those of the other ranks, before they are added.

A large error in one rank's gradients makes a norm that no other rank has. Ranks differ in their data, so a norm is
suspicious only if it is many times the median over ranks, and far beyond the differences seen so far. Suspicion is no
proof: the job goes back to a version before the step and computes it again. If only the suspected rank's norms have
changed then, its hardware erred; otherwise the batch was unusual.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from everstep.vocabulary import AuditLink, AuditRole
from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.gradient_exchange import GradientReader, GradientTap

log = logging.getLogger(__name__)

GROUPS = 256
"""Most groups of gradients of which norms are compared; more gradients share a group with their neighbours."""
MIN_RATIO = 16.0
"""A norm is suspicious from this multiple of the median over ranks. Ranks see different samples: in small batches the
norms of one parameter were seen to differ by up to a factor of five."""
SPREAD_FACTOR = 3.0
"""A deviation (of a logarithm) is suspicious from this multiple of the largest one of the last audits."""
REMEMBERED = 128
"""Audits whose largest deviation is remembered."""
WARMUP_AUDITS = 8
"""First audits of a generation, in which only a norm that is not finite is suspicious."""
MIN_RANKS = 3
"""With two ranks the median does not tell which one is unusual."""

_NO_STEP = -1.0
_suspected: dict[int, torch.Tensor] = {}
"""All ranks' norms in suspected steps, by step. It outlives the generation, so that the repetition is compared."""


class GradientNorms(Audit, GradientReader):
    """AuditLink.GRADIENT_NORM on one rank."""

    link = AuditLink.GRADIENT_NORM

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = setup.has_replica_per_rank and setup.world_size >= MIN_RANKS and tap.sees_gradients
        if not self._is_on and setup.rank == 0:
            log.info(
                "gradient norms are not compared: this needs %d ranks, each with a replica of its own, under "
                "run.replicate or fully_shard",
                MIN_RANKS,
            )
        self._norms: list[torch.Tensor] = []
        self._size: int | None = None  # of the vector of norms, the same on all ranks
        self._is_first = True
        self._repeated_step: int | None = None  # a suspected step that will be computed again
        self._deviations: list[float] = []
        self._is_reading = False

    def begin_step(self, step: int, *, due: bool) -> None:
        if self._is_on and (due or self._is_first or step == self._repeated_step):
            self._norms.clear()
            self._is_reading = True
            self._tap.open(self)

    def on_local(self, gradients: Sequence[torch.Tensor], slices: torch.Tensor) -> None:
        with self.cost():
            self._norms += torch._foreach_norm(list(gradients), dtype=torch.float32)

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self._is_reading = False
        self._tap.close(self)
        everyones = self._exchange(step)
        self._is_first = False
        if everyones.shape[1] == 0:
            return
        before = _suspected.pop(step, None)
        if before is not None and before.shape == everyones.shape:
            self._compare_repetition(step, before, everyones)
            return
        owner = self._suspect(everyones)
        if owner is not None:
            _suspected[step] = everyones
            self._report(step, owner, everyones)

    def close(self) -> None:
        self._tap.close(self)

    def _exchange(self, step: int) -> torch.Tensor:
        """Return the norms of all ranks, ranks x groups, and learn in the first audit which step is repeated."""
        setup = self.setup
        if self._size is None:
            size = torch.tensor([len(self._norms)], device=setup.device)
            dist.all_reduce(size, op=dist.ReduceOp.MAX)
            self._size = min(GROUPS, int(size.item()))
        pending = max((known for known in _suspected if known >= step), default=_NO_STEP)
        mine = torch.zeros(self._size + 2, dtype=torch.float64, device=setup.device)
        mine[0], mine[1] = len(self._norms), pending
        if self._norms:
            squares = torch.stack(self._norms).to(device=setup.device, dtype=torch.float64).square()
            groups = torch.arange(len(squares), device=setup.device) * self._size // len(squares)
            mine[2:] = torch.zeros_like(mine[2:]).index_add_(0, groups, squares).sqrt()
        self._norms.clear()
        everyones = mine.new_empty(setup.world_size, len(mine))
        all_gather(everyones.view(-1), mine)
        everyones = everyones.cpu()
        if self._is_first:
            pending_step = int(everyones[:, 1].max())
            self._repeated_step = pending_step if pending_step > step else None
        counts = everyones[:, 0]
        return everyones[:, 2:] if bool((counts == counts[0]).all()) else everyones[:, :0]

    def _suspect(self, everyones: torch.Tensor) -> int | None:
        """Return the rank with an unusual norm, or None."""
        finite = torch.isfinite(everyones)
        strange_ranks = (~finite).any(dim=1).nonzero().flatten().tolist()
        if len(strange_ranks) == 1:
            return int(strange_ranks[0])
        if strange_ranks:
            return None  # an overflow that several ranks share comes from the model
        medians = everyones.median(dim=0).values
        used = medians > 0
        if not bool(used.any()):
            return None
        deviations = (everyones[:, used] / medians[used]).log()  # far below the median is as usual as rare tokens
        largest, rank = deviations.max(dim=1).values.max(dim=0)
        limit = max(math.log(MIN_RATIO), SPREAD_FACTOR * max(self._deviations, default=0.0))
        is_known = len(self._deviations) >= WARMUP_AUDITS
        if is_known and float(largest) > limit:
            return int(rank)
        self._deviations.append(float(largest))
        del self._deviations[:-REMEMBERED]
        return None

    def _report(self, step: int, owner: int, everyones: torch.Tensor) -> None:
        if owner != self.setup.rank:
            return
        medians = everyones.median(dim=0).values
        group = int((everyones[owner] / medians.clamp_min(1e-30)).nan_to_num(math.inf).argmax())
        norm, median = float(everyones[owner, group]), float(medians[group])
        self.setup.report(
            Mismatch(
                link=self.link,
                step=step,
                unit=f"gradients, group {group} of {everyones.shape[1]}",
                owner=owner,
                role=AuditRole.OWNER,
                difference=f"the norm is {norm:.4g}, the median of all ranks {median:.4g}",
            )
        )

    def _compare_repetition(self, step: int, before: torch.Tensor, everyones: torch.Tensor) -> None:
        """Report this rank if its norms changed in the repetition of a step and those of all others did not."""
        changed = (before != everyones).any(dim=1).nonzero().flatten().tolist()
        if not changed:
            log.warning("step %d was repeated: its unusual gradients come from its samples, not from hardware", step)
        if changed == [self.setup.rank]:
            rank = self.setup.rank
            self.setup.report(
                Mismatch(
                    link=self.link,
                    step=step,
                    unit="gradients of a repeated step",
                    owner=rank,
                    role=AuditRole.OWNER,
                    original=_norm_hex(before[rank]),
                    digest=_norm_hex(everyones[rank]),
                    difference="only this rank's gradients changed when the step was computed again",
                )
            )


def _norm_hex(norms: torch.Tensor) -> str:
    bits = int(torch.linalg.vector_norm(norms).view(torch.int64).item())
    return bits.to_bytes(8, "big", signed=True).hex()
