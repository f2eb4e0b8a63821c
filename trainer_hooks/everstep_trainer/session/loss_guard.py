"""Guard against losses that are NaN or jump: refuse the update and take earlier ones back.

All ranks judge the same number, the mean loss, so they decide alike without further communication. The states to go
back to are copies in the rank's own memory, since checkpoints may be newer than the wanted state. Steps keep counting;
the data step (`LossGuard.data_step`) repeats after going back, with the refused batch or without it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from everstep.errors import EverstepError
from everstep_trainer.parallel.replicas import Loss
from everstep_trainer.state.arrays import ArraySource
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.python_value_codec import Blob
from everstep_trainer.state.sharded_state import ShardedState
from everstep_trainer.state.stateful_loader import is_stateful_loader
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState

# ---- spikes: judge a loss from those before it

MAD_TO_STD = 1.4826  # ratio of standard deviation to median absolute deviation for normal noise
MIN_SPREAD = 0.01  # smallest spread, as a fraction of the median: losses may be nearly equal


GuardPolicy = Literal["skip", "replay"]


class GuardOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``Run.guard``, where they are documented."""

    policy: GuardPolicy = "skip"
    rollback_copies: int = 1
    copy_every: int = 10
    max_refusals: int = 3
    spike_threshold: float | None = 10.0
    window: int = 64
    warmup: int = 16

    def __post_init__(self) -> None:
        if self.policy not in ("skip", "replay"):
            raise ValueError(f"policy is {self.policy!r}: skip leaves the batch out, replay computes it again")
        if self.rollback_copies < 0 or self.copy_every < 1 or self.max_refusals < 1:
            counts = f"copy_every {self.copy_every}, max_refusals {self.max_refusals}"
            raise ValueError(f"rollback_copies is {self.rollback_copies}, {counts}: at least 0, 1 and 1")
        threshold = self.spike_threshold
        if threshold is not None and threshold <= 0:
            raise ValueError(
                f"spike_threshold is {threshold}: a positive number of standard deviations, or None for NaN only"
            )
        if not 2 <= self.warmup <= self.window:
            raise ValueError(f"warmup is {self.warmup}: take 2 up to the window of {self.window} losses")

    def describe_problem(self, loss: float, accepted: Collection[float]) -> str:
        """Return why a loss is refused after the ``accepted`` ones, as a phrase; empty if it is accepted too."""
        if not math.isfinite(loss):
            return f"it is {loss}"
        if self.spike_threshold is None or len(accepted) < self.warmup:
            return ""
        middle = median(accepted)
        spread = max(MAD_TO_STD * median(abs(past - middle) for past in accepted), MIN_SPREAD * abs(middle))
        if loss <= middle + self.spike_threshold * spread:
            return ""
        return f"it is {(loss - middle) / spread:.1f} standard deviations above the last {len(accepted)}"


# ---- rollback copies: tracked state in a rank's own memory
#
# A bad update, such as a NaN gradient under a finite loss, shows only in the next loss. So a copy is on trial until a
# loss computed from it was allowed; until then the guard does not go back to it.

_Form = tuple[object, ...]


class RollbackCopy(NamedTuple):
    """A copy of this rank's tracked state before data step ``data_step``."""

    tensor_forms: list[_Form]  # name, shape, box, dtype and device of each of ``tensors``
    tensors: list[torch.Tensor]
    parameters_with_state: list[set[torch.Tensor]]  # for each optimizer, the parameters that had state
    blob: Blob
    data_step: int


class RollbackCopies:
    """At most ``count`` confirmed copies and one on trial."""

    def __init__(self, state: TrackedState, count: int) -> None:
        self._state, self._count = state, count
        self._tracked: list[TrackedTensor] = []
        self._confirmed: deque[RollbackCopy] = deque()
        self._trial: RollbackCopy | None = None
        self._spare: RollbackCopy | None = None

    @property
    def oldest(self) -> RollbackCopy | None:
        """The oldest confirmed copy; without any, the one on trial."""
        return self._confirmed[0] if self._confirmed else self._trial

    def take(self, data_step: int) -> None:
        """Copy the current state, before ``data_step``, as the copy on trial."""
        self._drop_trial()
        tracked, spare = self._find_tensors(), self._spare
        forms, live = [_form(tensor) for tensor in tracked], _live(tracked)
        self._spare = None
        fits = spare is not None and spare.tensor_forms == forms
        room = spare.tensors if spare is not None and fits else [torch.empty_like(tensor) for tensor in live]
        _copy(room, live)
        stateful = [set(optimizer.state) for optimizer in self._state.optimizers]
        self._trial = RollbackCopy(forms, room, stateful, self._state.capture(), data_step)

    def confirm(self) -> None:
        """Confirm the copy on trial: a loss computed from it was good."""
        if self._trial is not None:
            self._confirmed.append(self._trial)
            self._trial = None
        if len(self._confirmed) > self._count:
            self._spare = self._confirmed.popleft()

    def clear(self) -> None:
        """Forget all copies, because the tracked state is no longer the copied one."""
        self._confirmed.clear()
        self._trial = self._spare = None

    def can_roll_back(self) -> bool:
        """Return whether a copy fits the tensors tracked now; optimizer state may have been added since."""
        version = self.oldest
        return version is not None and [_form(tensor) for tensor in self._tensors_of(version)] == version.tensor_forms

    def roll_back(self) -> RollbackCopy:
        """Restore the oldest copy after ``can_roll_back``, and forget newer ones. Call ``before_update`` first."""
        version = self.oldest
        assert version is not None, "can_roll_back was asked"
        if self._confirmed:
            self._drop_trial()
            self._confirmed = deque([version])
        _copy(_live(self._tensors_of(version)), version.tensors)
        for optimizer, had in zip(self._state.optimizers, version.parameters_with_state, strict=True):
            for parameter in optimizer.state.keys() - had:
                del optimizer.state[parameter]
        self._state.load_python(MergedState([decode(version.blob.data())], self._state.python_names()))
        return version

    def _drop_trial(self) -> None:
        if self._trial is not None:
            self._spare, self._trial = self._trial, None

    def _find_tensors(self) -> list[TrackedTensor]:
        if not self._tracked or not self._state.is_unchanged():
            self._tracked = self._state.tensors()
        return self._tracked

    def _tensors_of(self, version: RollbackCopy) -> list[TrackedTensor]:
        """Return the tensors tracked now, without the state of optimizer parameters that had none in ``version``."""
        since = {
            id(optimizer.state[parameter])
            for optimizer, had in zip(self._state.optimizers, version.parameters_with_state, strict=True)
            for parameter in optimizer.state.keys() - had
        }
        return [tensor for tensor in self._find_tensors() if id(tensor.container) not in since]


def _form(tensor: TrackedTensor) -> _Form:
    return tensor.name, tensor.shape, tensor.box, tensor.local.dtype, tensor.local.device


def _live(tracked: list[TrackedTensor]) -> list[torch.Tensor]:
    return [tensor.current() if tensor.is_volatile else tensor.local for tensor in tracked]


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if of:  # torch refuses empty lists
        with torch.no_grad():
            torch._foreach_copy_(to, of)


log = logging.getLogger(__name__)

MAX_RECORDS = 100


class LossDiverged(EverstepError, RuntimeError):
    """The loss stayed bad after repeated rollbacks; the message says how often and where to look."""


class LossGuard:
    """The guard that ``Run.guard`` makes, tracked with the user's objects; ``mean``, ``on_all_ranks``: collectives."""

    def __init__(
        self,
        mean: Callable[[Loss | None, float], torch.Tensor],
        on_all_ranks: Callable[[bool], bool],
        before_update: Callable[[], None],  # called before tracked state is changed
        on_refusal: Callable[[int, str], None],  # receives the data step and the message
        options: GuardOptions,
        log_fields: Mapping[str, object],
    ) -> None:
        self._mean, self._on_all_ranks, self._before_update = mean, on_all_ranks, before_update
        self._on_refusal, self._options = on_refusal, options
        self._log_fields = dict(log_fields)
        self._losses: deque[float] = deque(maxlen=options.window)
        self._data_step = 1
        self._skipped_data_steps: set[int] = set()
        self._refusals_in_a_row = 0
        self._highest_refused_step = 0
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._updated: int | None = None
        self._copies: RollbackCopies | None = None
        self._done_here = 0

    @property
    def data_step(self) -> int:
        """The step, from 1, whose data to compute now; pass it to the sampler or loader."""
        return self._data_step

    @property
    def records(self) -> list[dict[str, Any]]:
        """The guard's last interventions, the newest last, at most a hundred."""
        return list(self._records)

    def allows(self, loss: Loss | None, weight: float = 1.0) -> bool:
        """Return whether to make the update. Call it on every rank, after the backward pass.

        If it returns False, the state is that of the oldest copy, if there was one; ignore the gradients. Waits for the
        loss.

        Example::

            (loss * weight).backward()
            if guard.allows(loss, weight):
                optimizer.step()

        Args:
            loss: As for ``Run.mean``.
            weight: As for ``Run.mean``.

        Raises:
            LossDiverged: ``max_refusals`` refusals came in a row without progress beyond the last refused step.
        """
        value = float(self._mean(loss, weight))
        if reason := self._options.describe_problem(value, self._losses):
            self._refuse(value, reason)
            return False
        self._losses.append(value)
        self._updated = self._data_step
        if self._copies is not None:
            self._copies.confirm()
        if self._data_step > self._highest_refused_step:
            self._refusals_in_a_row = 0
        self._data_step += 1
        self._skip_data_steps()
        return True

    def require_compatible(self, objects: Mapping[str, object]) -> None:
        """Raise ValueError for tracked objects that cannot be rolled back together with the guard."""
        if "guard" in objects:
            raise ValueError("the run's guard is tracked under the name guard: track your object under another name")
        again = self._options.rollback_copies > 0 or self._options.policy == "replay"
        for key, tracked in objects.items():
            if isinstance(tracked, ArraySource):
                raise ValueError(f"{key} holds arrays that are replaced in each step, which run.guard cannot roll back")
            if isinstance(tracked, ShardedState):
                raise ValueError(f"{key} belongs to an engine that owns its gradients: leave out run.guard")
            # its iterator would go on while its stored state went back
            if again and is_stateful_loader(tracked):
                raise ValueError(
                    f"{key} is a StatefulDataLoader, which cannot go back within an epoch: take run.loader with "
                    'guard.data_step, or a guard that only skips updates (run.guard(policy="skip", rollback_copies=0))'
                )

    def track_objects(self, objects: Mapping[str, object], exclude: Iterable[str] = ()) -> None:
        """Begin to keep copies of the restored objects, without those that ``exclude`` matches."""
        if self._options.rollback_copies:
            self._copies = RollbackCopies(TrackedState(objects, exclude), self._options.rollback_copies)
            self._copies.take(self._data_step)

    def step_finished(self) -> None:
        """Take a copy of the tracked state every ``copy_every`` steps."""
        self._done_here += 1
        if self._copies is not None and self._done_here % self._options.copy_every == 0:
            self._copies.take(self._data_step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "data_step": self._data_step,
            "skipped_data_steps": sorted(self._skipped_data_steps),
            "refusals_in_a_row": self._refusals_in_a_row,
            "highest_refused_step": self._highest_refused_step,
            "losses": list(self._losses),
            "records": list(self._records),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._data_step = stored["data_step"]
        self._skipped_data_steps = set(stored["skipped_data_steps"])
        self._refusals_in_a_row = stored["refusals_in_a_row"]
        self._highest_refused_step = stored["highest_refused_step"]
        self._losses.extend(stored["losses"])
        self._records.extend(stored["records"])

    def _refuse(self, loss: float, reason: str) -> None:
        self._refusals_in_a_row += 1
        bad = self._data_step
        self._highest_refused_step = max(self._highest_refused_step, bad)
        if self._refusals_in_a_row > self._options.max_refusals:
            raise LossDiverged(
                f"the loss of data step {bad} is {loss:.6g} ({reason}), after {self._options.max_refusals} refusals "
                "in a row: going back does not help. Check the learning rate and the data, or raise "
                "spike_threshold or max_refusals of run.guard"
            )
        updated = self._updated
        version = self._go_back()
        if self._options.policy == "skip":
            self._skipped_data_steps.add(bad)
            if self._refusals_in_a_row > 1 and version and updated is not None and updated >= version.data_step:
                # skipping the refused batch did not help, so this update may be the cause
                self._skipped_data_steps.add(updated)
            self._skip_data_steps()
        back_to = None if version is None else version.data_step
        to = "" if version is None else f" and went back to before data step {back_to}"
        done = "left its batch out" if self._options.policy == "skip" else "will compute its batch again"
        message = f"the loss of data step {bad} is {loss:.6g} ({reason}): made no update{to}, {done}"
        log.warning("%s", message, extra=self._log_fields)
        self._on_refusal(bad, message)
        record = {"data_step": bad, "loss": loss, "reason": reason, "policy": self._options.policy, "back_to": back_to}
        self._records.append(record)

    def _go_back(self) -> RollbackCopy | None:
        """Restore the oldest copy and return it; None if some rank has no copy."""
        copies = self._copies
        can_roll_back = self._on_all_ranks(copies is not None and copies.can_roll_back())
        if copies is None:
            return None
        if not can_roll_back:
            copies.clear()
            return None
        self._before_update()
        version = copies.roll_back()
        self._data_step, self._updated = version.data_step, None
        return version

    def _skip_data_steps(self) -> None:
        while self._data_step in self._skipped_data_steps:
            self._data_step += 1
        oldest = None if self._copies is None else self._copies.oldest
        first = self._data_step if oldest is None else oldest.data_step
        self._skipped_data_steps = {step for step in self._skipped_data_steps if step >= first}
