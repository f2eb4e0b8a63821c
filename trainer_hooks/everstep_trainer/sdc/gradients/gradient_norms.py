"""Compare the norms of each rank's gradients with those of the other ranks, before they are added.

A large error in one rank's gradients makes a norm that no other rank has. Each rank takes the norms in due steps, which
needs no other rank; all ranks exchange those of the last steps together. Ranks differ in their data, so a norm is
suspicious only if it is many times the median over ranks, and far beyond what other ranks had so far. Suspicion is no
proof: the job goes back to a version before the step and computes it again, with the suspected node and another one
in exchanged seats. If the unusual norm stays with the samples, the batch was unusual; otherwise hardware erred.

NaN of one rank reaches the parameters of all ranks with the next update. If it first shows in the norms of several
ranks, the job goes back, and norms are read in each of the repeated steps until the rank is found that was the first.

All ranks must exchange in the same steps. So each decision follows from what was exchanged, or was agreed on in the
generation's first step: a new rank remembers nothing of earlier ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from everstep.vocabulary import AuditKind
from everstep_trainer.digests.digest import float_hex
from everstep_trainer.parallel.lane import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.gradients.gradient_exchange import GradientReader, GradientTap
from everstep_trainer.state.tensors import local_part
from everstep_trainer.state.tracked_objects import TrackedObjects

log = logging.getLogger(__name__)

GROUPS = 256
"""Most groups of gradients of which norms are compared; more gradients share a group with their neighbours."""
MIN_RATIO = 16.0
"""A norm is suspicious from this multiple of the median over ranks. Ranks see different samples: in small batches the
norms of one parameter were seen to differ by up to a factor of five."""
SPREAD_FACTOR = 3.0
"""A deviation (of a logarithm) is suspicious from this multiple of the largest one that other ranks had lately. Those
of the rank itself do not count, as a GPU that errs often would make its errors usual."""
CHANGED_RATIO = 4.0
"""Norms of the same samples count as changed from this factor on: another node's kernels may round in another way."""
SAME_STEP_TOLERANCE = 0.01
"""Largest relative difference, in the median over groups, of a rank's norms in a step and in its repetition. Beyond it
the samples or the state before the step are others, and the two say nothing about each other."""
REMEMBERED = 128
"""Fewest due steps for which a deviation counts; it counts for twice as many at most."""
WARMUP_STEPS = 8
"""First due steps of a generation, in which only a norm that is not finite is suspicious."""
STEPS_BETWEEN_EXCHANGES = 16
"""Fewest steps from one exchange to the next. It costs more than the norms of one step, but can take those of many."""
STEPS_READ_AFTER_REFUSAL = 16
"""Steps in which norms are read after the guard refused an update."""
MIN_RANKS = 3
"""With two ranks the median does not tell which one is unusual."""


class _SuspectedStep(NamedTuple):
    """The norms of a suspected step, ranks x groups, the suspected rank, and whether this process was that rank."""

    norms: torch.Tensor
    owner: int
    is_own: bool


@dataclass
class StepsToRepeat:
    """What this process remembers of steps that may be computed again, in a later generation.

    Attributes:
        suspected: The suspected steps.
        read_each_step_until: The last step in which norms are read although they are not due.
        deviation_of_samples: The largest deviation that a repetition showed to come from samples.
    """

    suspected: dict[int, _SuspectedStep] = field(default_factory=dict)
    read_each_step_until: int = -1
    deviation_of_samples: float = 0.0

    def clear(self) -> None:
        self.suspected.clear()
        self.read_each_step_until, self.deviation_of_samples = -1, 0.0


to_repeat = StepsToRepeat()


class _Agreement(NamedTuple):
    """What all ranks know in a generation of earlier ones.

    Attributes:
        norms: Most gradients of a rank.
        suspected_step: The next suspected step; -1: none.
        suspected_rank: Its rank.
        is_exchanged: The suspected process has another rank now, and another process has its samples.
        read_each_step_until: As in `StepsToRepeat`.
        deviation_of_samples: As in `StepsToRepeat`.
    """

    norms: int = 0
    suspected_step: int = -1
    suspected_rank: int = -1
    is_exchanged: bool = False
    read_each_step_until: int = -1
    deviation_of_samples: float = 0.0


class _Kept(NamedTuple):
    """The norms of a step by group, and the step of the update before."""

    norms: torch.Tensor
    previous: int


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm of each gradient, of any floating-point or complex dtype, in float32."""
    parts = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    if all(part.itemsize <= torch.float32.itemsize for part in parts):
        return list(torch._foreach_norm(parts, dtype=torch.float32))
    return [norm.float() for norm in torch._foreach_norm(parts, dtype=torch.float64)]


class GradientNorms(Audit, GradientReader):
    """AuditKind.GRADIENT_NORM on one rank."""

    kind = AuditKind.GRADIENT_NORM

    def __init__(self, setup: AuditSetup, tap: GradientTap) -> None:
        super().__init__(setup)
        self._tap = tap
        self._is_on = setup.has_replica_per_rank and setup.world_size >= MIN_RANKS and tap.sees_gradients
        # DDP forms other buckets after the first step, so norms are put into groups by the order of the parameters.
        self._tracked = TrackedObjects(setup.objects)
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        self._is_reading = False
        self._norms: list[torch.Tensor] = []  # of the running step
        self._norm_places: list[int] = []
        self._grouping: tuple[list[int], torch.Tensor] | None = None  # the last places, and the groups of their norms
        self._kept: dict[int, _Kept] = {}  # of the steps since the last exchange
        self._exchanged_step = 0
        self._agreed: _Agreement | None = None
        # The largest deviations of each rank, in up to two spans of REMEMBERED due steps, the newest span last.
        self._largest: list[torch.Tensor] = []
        self._remembered = 0  # due steps
        self._first_step = -1  # of the generation
        self._finite_step = -1  # the last step whose norms were read and finite, or before the generation's first one
        self._nonfinite_since = 0  # a step, if it is known how norms came to be infinite or NaN in it; 0: they are not
        self._has_logged_nonfinite = False
        self._watched_until = -1  # after a refused update
        self._was_refused = False  # the last update
        self._refused_rank: int | None = None  # that alone had NaN in it; -1: there was none, None: norms were not read

    def gaps(self) -> Iterator[str]:
        if not self._is_on:
            places = "each with a replica of its own, under run.replicate or fully_shard"
            yield f"audit gradient_norm is off: it needs {MIN_RANKS} ranks, {places}"

    def is_needed(self, step: int) -> bool:
        """Return whether norms are read in this step for the sake of earlier ones."""
        is_read = self._agreed is None or self._is_repeated(step) or step <= self._watched_until
        return self._is_on and is_read

    def begin_step(self, step: int, *, due: bool) -> None:
        self.close()
        if self._agreed is None:
            self._first_step, self._finite_step = step, step - 1
        if self._is_on:
            self._is_reading = True
            self._norms.clear()
            self._norm_places.clear()
            self._tap.open(self)

    def on_local(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        sent: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        with self.cost():
            begin = len(self._norms)
            self._norms += norms_of(gradients)
            after = len(self._places)
            if parameters:
                self._norm_places += [self._places.get(id(parameter), after) for parameter in parameters]
            else:  # shards, always in the same order
                self._norm_places += range(after + begin, after + len(self._norms))

    def before_update(self, step: int, *, due: bool) -> None:
        self._was_refused = False
        if not self._is_reading:
            return
        previous = step - 1 if step == self._first_step else self.previous_update
        self._kept[step] = _Kept(self._without_overflow(self._read(step)), previous)
        if step - self._exchanged_step >= STEPS_BETWEEN_EXCHANGES or self._is_repeated(step):
            self._judge_kept(step)

    def update_refused(self, step: int) -> None:
        """Compare the step's norms at once if they were read, and read those of the next steps.

        One bad batch makes one rank's gradients NaN, and the guard leaves it out. A rank that is alone with NaN is
        suspected in the second refused step in a row.
        """
        before = self._refused_rank if self._was_refused else -1
        self._was_refused, self._refused_rank = True, None
        self._watched_until = step + STEPS_READ_AFTER_REFUSAL
        if not self._is_reading:
            return
        everyones = self._exchange([self._read(step)])[:, 0]
        if self._is_suspected(step):
            self._judge_repetition(step, everyones)
            return
        ranks = _ranks_where(~torch.isfinite(everyones))
        self._refused_rank = ranks[0] if len(ranks) == 1 else -1
        if len(ranks) == 1 and before in (None, ranks[0]):
            self._suspect(step, ranks[0], everyones)

    def close(self) -> None:
        self._is_reading = False
        self._tap.close(self)

    # ---- reading and exchanging norms

    def _read(self, step: int) -> torch.Tensor:
        """Return the running step's norms by group. A collective in the first step of a generation."""
        self.close()
        if self._agreed is None:
            self._agree(step)
            self._exchanged_step = step
        return self._grouped()

    def _agree(self, step: int) -> None:
        """Agree with all ranks on what each needs to know of the others. A collective."""
        rank, world = self.setup.rank, self.setup.world_size
        steps = [
            suspected_step
            for suspected_step, seen in to_repeat.suspected.items()
            if suspected_step >= step and len(seen.norms) == world
        ]
        mine = _Agreement(
            norms=len(self._norms),
            read_each_step_until=to_repeat.read_each_step_until,
            deviation_of_samples=to_repeat.deviation_of_samples,
        )
        if steps:
            _, owner, is_own = to_repeat.suspected[min(steps)]
            mine = mine._replace(suspected_step=min(steps), suspected_rank=owner, is_exchanged=is_own and owner != rank)
        largest = torch.tensor(mine, dtype=torch.float64, device=self.setup.device)
        with self.waiting():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        norms, suspected_step, suspected_rank, is_exchanged, read_until, deviation = largest.tolist()
        self._agreed = _Agreement(
            int(norms), int(suspected_step), int(suspected_rank), bool(is_exchanged), int(read_until), deviation
        )

    def _grouped(self) -> torch.Tensor:
        """Return the norms that were read, by group; nothing waits for the device."""
        size = min(GROUPS, self._agreed.norms) if self._agreed is not None else 0
        grouped = torch.zeros(size, dtype=torch.float64, device=self.setup.device)
        if self._norms and size:
            if self._grouping is None or self._grouping[0] != self._norm_places:
                count, groups = len(self._norms), [0] * len(self._norms)
                for number, at in enumerate(sorted(range(count), key=self._norm_places.__getitem__)):
                    groups[at] = number * size // count
                self._grouping = list(self._norm_places), torch.tensor(groups, device=self.setup.device)
            squares = torch.stack(self._norms).to(device=self.setup.device, dtype=torch.float64).square()
            grouped.index_add_(0, self._grouping[1], squares)
        self._norms.clear()
        return grouped.sqrt()

    def _without_overflow(self, norms: torch.Tensor) -> torch.Tensor:
        """Return zeros if a GradScaler has found an overflow, so that the fused optimizer leaves its update out."""
        for _, optimizer in self._tracked.optimizers:
            if isinstance(found := getattr(optimizer, "found_inf", None), torch.Tensor):
                norms = norms.where(found.to(norms.device) == 0, 0.0)
        return norms

    def _exchange(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return these norms of all ranks, ranks x steps x groups. A collective."""
        mine = torch.stack([*norms])
        everyones = mine.new_empty(self.setup.world_size, *mine.shape)
        with self.waiting():
            all_gather(everyones.view(-1), mine.view(-1))
        return everyones.cpu()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for _, module in self._tracked.modules:
            yield from module.parameters()

    def _has_finite_parameters(self) -> bool:
        """Return whether the parameters of all ranks are finite. A collective, as shards may differ."""
        own = all(bool(torch.isfinite(local_part(parameter)).all()) for parameter in self._parameters())
        is_finite = torch.tensor(float(own), device=self.setup.device)
        with self.waiting():
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return bool(is_finite)

    # ---- judging

    def _is_suspected(self, step: int) -> bool:
        return self._agreed is not None and step == self._agreed.suspected_step

    def _is_repeated(self, step: int) -> bool:
        """Return whether all ranks read the norms of this step because of what they were before the job went back."""
        return self._agreed is not None and (
            step == self._agreed.suspected_step or step <= self._agreed.read_each_step_until
        )

    def _judge_kept(self, step: int) -> None:
        """Exchange the kept norms in ``step``, and judge them in the order of their steps. A collective."""
        kept = dict(self._kept)
        everyones = self._exchange([measured.norms for measured in kept.values()])
        self._kept.clear()
        self._exchanged_step = step
        for place, (measured, (_, previous)) in enumerate(kept.items()):
            if self._judge(measured, previous, everyones[:, place]):
                return  # later steps follow from this one

    def _judge(self, step: int, previous: int, everyones: torch.Tensor) -> bool:
        """Judge the norms of a step, ranks x groups; return whether the steps after it are judged no more."""
        strange_ranks = _ranks_where(~torch.isfinite(everyones))
        if self._is_suspected(step):
            self._judge_repetition(step, everyones)
            self._note_finiteness(step, strange_ranks)
            return False
        # before_update knows only whether the first of several optimizers leaves its update out
        has_several = len(self._tracked.optimizers) > 1 and not self._is_repeated(step)
        if strange_ranks and has_several and self._has_finite_parameters():
            return False
        if len(strange_ranks) > 1:
            return self._judge_shared(step, previous, strange_ranks)
        self._note_finiteness(step, strange_ranks)
        owner = strange_ranks[0] if strange_ranks else self._unusual_rank(everyones)
        if owner is None:
            return False
        self._suspect(step, owner, everyones)
        return True

    def _note_finiteness(self, step: int, strange_ranks: Sequence[int]) -> None:
        """Note whether the norms of a step were finite, where it is known how NaN may have come."""
        if strange_ranks:
            self._nonfinite_since, self._has_logged_nonfinite = step, True
        else:
            self._finite_step, self._nonfinite_since = step, 0

    def _judge_shared(self, step: int, previous: int, strange_ranks: Sequence[int]) -> bool:
        """Judge a step in which the norms of several ranks are not finite; return whether the first one is sought.

        A collective.
        """
        if self._finite_step == previous and not self._nonfinite_since:
            self._nonfinite_since = step
        if self._has_finite_parameters():
            return False  # so far
        if self._nonfinite_since:
            if self.setup.rank == strange_ranks[0] and not self._has_logged_nonfinite:
                self._has_logged_nonfinite = True
                log.warning(
                    "the gradients of %d ranks are infinite or NaN since step %d%s",
                    len(strange_ranks),
                    self._nonfinite_since,
                    ", the first one of this generation: the restored state may hold NaN"
                    if self._nonfinite_since == self._first_step
                    else ", and no rank was the first: the cause is the model, its learning rate or its data, or a sum "
                    "or update that went wrong on one rank",
                )
            return False
        if self.setup.rank == strange_ranks[0]:
            self.report_own(
                self._finite_step + 1,
                "gradients",
                wrong_results=0,
                difference=f"in step {step} those of {len(strange_ranks)} ranks are infinite or NaN",
            )
        to_repeat.read_each_step_until = step
        return True

    def _unusual_rank(self, everyones: torch.Tensor) -> int | None:
        """Return the rank with an unusually large norm, or None. All norms are finite."""
        deviations = _deviations(everyones)
        largest, rank = float(deviations.max()), int(deviations.argmax())
        if self._remembered >= WARMUP_STEPS:
            of_others = torch.stack(self._largest).amax(dim=0)
            of_others[rank] = self._agreed.deviation_of_samples if self._agreed is not None else 0.0
            if largest > max(math.log(MIN_RATIO), SPREAD_FACTOR * float(of_others.max())):
                return rank
        if self._remembered % REMEMBERED == 0:
            self._largest = [*self._largest[-1:], deviations]
        else:
            self._largest[-1] = torch.maximum(self._largest[-1], deviations)
        self._remembered += 1
        return None

    def _suspect(self, step: int, owner: int, everyones: torch.Tensor) -> None:
        """Remember the step for its repetition; the suspected rank reports it."""
        to_repeat.suspected[step] = _SuspectedStep(everyones, owner, owner == self.setup.rank)
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

    # ---- judging a repetition

    def _judge_repetition(self, step: int, everyones: torch.Tensor) -> None:
        """Judge the repetition of the suspected step, in which the suspected process may have another rank."""
        agreed, before = self._agreed, to_repeat.suspected.get(step)
        for later in [suspected_step for suspected_step in to_repeat.suspected if suspected_step >= step]:
            del to_repeat.suspected[later]  # later ones followed from what the suspected step had made
        if agreed is not None and agreed.is_exchanged:
            deviation = float(_deviations(everyones)[agreed.suspected_rank])
            if math.log(MIN_RATIO) < deviation < math.inf:  # another node gets it from the same samples, too
                self._agreed = agreed._replace(deviation_of_samples=max(agreed.deviation_of_samples, deviation))
                to_repeat.deviation_of_samples = self._agreed.deviation_of_samples
        if before is not None and before.is_own and before.norms.shape == everyones.shape:
            self._compare_repetition(step, before, everyones)

    def _compare_repetition(self, step: int, before: _SuspectedStep, everyones: torch.Tensor) -> None:
        """Report this process, which was rank ``before.owner``, if its hardware erred.

        If it has another rank now, the process that was this rank has exchanged the samples with it.
        """
        rank, owner = self.setup.rank, before.owner
        others = [other for other in range(len(everyones)) if other not in (owner, rank)]
        changed = _ranks_where(_has_changed(before.norms, everyones))
        deviations = _deviations(everyones)
        usual = (deviations <= math.log(MIN_RATIO)) & torch.isfinite(everyones).all(dim=1)
        if owner not in changed:
            if rank == owner:
                cause = "its samples, or a GPU that errs in the same way each time"
                deviation = float(deviations[owner])
                if deviation < math.inf:
                    to_repeat.deviation_of_samples = max(to_repeat.deviation_of_samples, deviation)
            else:
                cause = "its samples, as another node got the same from them"
                self._withdraw_suspicion(step, before)
            log.warning("step %d was repeated; the cause of the unusual gradients of rank %d: %s", step, owner, cause)
        elif not _is_same_step(before.norms[others], everyones[others]):
            log.warning(
                "step %d was repeated, but the gradients of other ranks changed, too: nothing follows about the "
                "unusual ones of rank %d",
                step,
                owner,
            )
        elif rank == owner:
            self._report_repetition(step, before, everyones, 1, "no other rank's gradients changed in the repetition")
        elif not usual[owner]:
            log.warning(
                "step %d was repeated, and another node got other unusual gradients from the samples of rank %d: "
                "nothing follows about either node",
                step,
                owner,
            )
        elif usual[rank] or rank not in changed:
            self._report_repetition(step, before, everyones, 1, f"rank {owner} gets usual ones from the same samples")
        else:
            words = "another node got usual ones from the samples of both runs"
            self._report_repetition(step, before, everyones, 2, words)

    def _withdraw_suspicion(self, step: int, before: _SuspectedStep) -> None:
        """Say that the samples of this process's earlier rank are the cause, and not its GPU."""
        norm = float_hex(torch.linalg.vector_norm(before.norms[before.owner]))
        words = f"another node got the same gradients from the samples of rank {before.owner}"
        self.report_own(step, "gradients", original=norm, digest=norm, difference=words)

    def _report_repetition(
        self, step: int, before: _SuspectedStep, everyones: torch.Tensor, wrong_results: int, difference: str
    ) -> None:
        self.report_own(
            step,
            "gradients",
            original=float_hex(torch.linalg.vector_norm(before.norms[before.owner])),
            digest=float_hex(torch.linalg.vector_norm(everyones[before.owner])),
            wrong_results=wrong_results,
            difference=difference,
        )


def _ranks_where(condition: torch.Tensor) -> list[int]:
    """Return the ranks for which any of a condition's values, ranks x groups, is true."""
    ranks: list[int] = condition.any(dim=1).nonzero().flatten().tolist()
    return ranks


def _has_changed(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return which norms, ranks x groups, have changed by CHANGED_RATIO, or to or from infinity or NaN."""
    ratios = (now.log() - before.log()).abs()  # NaN where both are zero
    return (torch.isfinite(before) != torch.isfinite(now)) | (torch.isfinite(now) & (ratios > math.log(CHANGED_RATIO)))


def _is_same_step(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether the norms of some ranks, ranks x groups, can be those of one step that was done twice."""
    differences = ((now - before).abs() / before).nan_to_num(0.0)  # NaN where both are zero
    return bool((differences.median(dim=1).values <= SAME_STEP_TOLERANCE).all())


def _deviations(everyones: torch.Tensor) -> torch.Tensor:
    """Return by how much each rank's most unusual norm exceeds the median over ranks, as a logarithm.

    A norm far below the median is usual: a rank may see no sample of a rare token.

    Args:
        everyones: Norms, ranks x groups.

    Returns:
        One value per rank; minus infinity if no group has gradients.
    """
    medians = everyones.nanmedian(dim=0).values
    used = medians > 0
    if not bool(used.any()):
        return everyones.new_full((len(everyones),), -math.inf)
    return (everyones[:, used] / medians[used]).log().max(dim=1).values
