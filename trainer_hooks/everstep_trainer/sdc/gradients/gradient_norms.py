"""Compare the norms of each rank's gradients with those of the other ranks, before they are added.

A large error in one rank's gradients makes a norm that no other rank has. Each rank takes the norms in due steps, which
needs no other rank; all ranks exchange those of the last steps together. Ranks differ in their data, so a norm is
suspicious only if it is many times the median over ranks, and far beyond the differences seen so far. Suspicion is no
proof: the job goes back to a version before the step and computes it again. If only the suspected rank's norms have
changed then, its hardware erred; otherwise the batch was unusual.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from everstep.vocabulary import AuditLink
from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.digests.digest import float_hex
from everstep_trainer.sdc.gradients.gradient_exchange import GradientReader, GradientTap

log = logging.getLogger(__name__)

GROUPS = 256
"""Most groups of gradients of which norms are compared; more gradients share a group with their neighbours."""
MIN_RATIO = 16.0
"""A norm is suspicious from this multiple of the median over ranks. Ranks see different samples: in small batches the
norms of one parameter were seen to differ by up to a factor of five."""
SPREAD_FACTOR = 3.0
"""A deviation (of a logarithm) is suspicious from this multiple of the largest one of the last steps."""
REMEMBERED = 256
"""Due steps whose largest deviation is remembered."""
WARMUP_STEPS = 8
"""First due steps of a generation, in which only a norm that is not finite is suspicious."""
STEPS_BETWEEN_EXCHANGES = 16
"""Fewest steps from one exchange to the next. It costs more than the norms of one step, but can take those of many."""
MIN_RANKS = 3
"""With two ranks the median does not tell which one is unusual."""

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
        self._is_reading = False
        self._norms: list[torch.Tensor] = []  # of the running step
        self._kept: dict[int, torch.Tensor] = {}  # by group, of the steps since the last exchange
        self._exchanged_step = 0
        # All ranks agree in their first step on the size of a step's vector of norms, and on the next suspected step.
        self._size: int | None = None
        self._suspected_step = -1
        self._deviations: deque[float] = deque(maxlen=REMEMBERED)

    def begin_step(self, step: int, *, due: bool) -> None:
        self.close()
        if self._is_on and (due or self._size is None or step == self._suspected_step):
            self._is_reading = True
            self._norms.clear()
            self._tap.open(self)

    def on_local(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], slices: torch.Tensor
    ) -> None:
        with self.cost():
            self._norms += torch._foreach_norm(list(gradients), dtype=torch.float32)

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._is_reading:
            return
        self.close()
        if self._size is None:
            self._agree(step)
            self._exchanged_step = step
        self._kept[step] = self._grouped()
        if step - self._exchanged_step < STEPS_BETWEEN_EXCHANGES and step != self._suspected_step:
            return
        self._exchanged_step = step
        steps = list(self._kept)
        everyones = self._exchange()
        for place, one in enumerate(steps):
            if self._judge(one, everyones[:, place]):
                return  # later steps follow from this one

    def _judge(self, step: int, everyones: torch.Tensor) -> bool:
        """Judge the norms of one step, ranks x groups; return whether a rank is suspected."""
        before = _suspected.pop(step, None)
        if before is not None and before.shape == everyones.shape:
            self._compare_repetition(step, before, everyones)
            return False
        owner = self._suspect(everyones)
        if owner is None:
            return False
        _suspected[step] = everyones
        self._report(step, owner, everyones)
        return True

    def close(self) -> None:
        self._is_reading = False
        self._tap.close(self)

    def _agree(self, step: int) -> None:
        """Agree with all ranks on what each needs to know of the others; a new rank has suspected nobody yet."""
        suspected = min((one for one in _suspected if one >= step), default=-1)
        mine = torch.tensor([len(self._norms), suspected], device=self.setup.device)
        with self.waiting():
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        size, self._suspected_step = mine.tolist()
        self._size = min(GROUPS, size)

    def _grouped(self) -> torch.Tensor:
        """Return the running step's norms by group; nothing waits for the device."""
        size = self._size or 0
        grouped = torch.zeros(size, dtype=torch.float64, device=self.setup.device)
        if self._norms and size:
            squares = torch.stack(self._norms).to(device=self.setup.device, dtype=torch.float64).square()
            groups = torch.arange(len(squares), device=self.setup.device) * size // len(squares)
            grouped.index_add_(0, groups, squares)
        self._norms.clear()
        return grouped.sqrt()

    def _exchange(self) -> torch.Tensor:
        """Return the kept norms of all ranks, ranks x steps x groups."""
        mine = torch.stack([*self._kept.values()])
        self._kept.clear()
        everyones = mine.new_empty(self.setup.world_size, *mine.shape)
        with self.waiting():
            all_gather(everyones.view(-1), mine.view(-1))
        return everyones.cpu()

    def _suspect(self, everyones: torch.Tensor) -> int | None:
        """Return the rank with an unusual norm, or None."""
        finite = torch.isfinite(everyones)
        strange_ranks = (~finite).any(dim=1).nonzero().flatten().tolist()
        if len(strange_ranks) == 1:
            return int(strange_ranks[0])
        if strange_ranks:
            return None  # an overflow that several ranks share comes from the model
        medians = everyones.nanmedian(dim=0).values
        used = medians > 0
        if not bool(used.any()):
            return None
        deviations = (everyones[:, used] / medians[used]).log()  # far below the median is as usual as rare tokens
        largest, rank = deviations.max(dim=1).values.max(dim=0)
        limit = max(math.log(MIN_RATIO), SPREAD_FACTOR * max(self._deviations, default=0.0))
        is_known = len(self._deviations) >= WARMUP_STEPS
        if is_known and float(largest) > limit:
            return int(rank)
        self._deviations.append(float(largest))
        return None

    def _report(self, step: int, owner: int, everyones: torch.Tensor) -> None:
        if owner != self.setup.rank:
            return
        medians = everyones.nanmedian(dim=0).values
        group = int((everyones[owner] / medians.clamp_min(1e-30)).nan_to_num(math.inf).argmax())
        norm, median = float(everyones[owner, group]), float(medians[group])
        self.report_own(
            step,
            f"gradients, group {group} of {everyones.shape[1]}",
            difference=f"the norm is {norm:.4g}, the median of all ranks {median:.4g}",
        )

    def _compare_repetition(self, step: int, before: torch.Tensor, everyones: torch.Tensor) -> None:
        """Report this rank if its norms changed in the repetition of a step and those of all others did not."""
        differs = (before != everyones) & ~(before.isnan() & everyones.isnan())  # samples may give NaN each time
        changed = differs.any(dim=1).nonzero().flatten().tolist()
        if not changed:
            log.warning("step %d was repeated: its unusual gradients come from its samples, not from hardware", step)
        if changed == [self.setup.rank]:
            rank = self.setup.rank
            self.report_own(
                step,
                "gradients of a repeated step",
                original=float_hex(torch.linalg.vector_norm(before[rank])),
                digest=float_hex(torch.linalg.vector_norm(everyones[rank])),
                difference="only this rank's gradients changed when the step was computed again",
            )
