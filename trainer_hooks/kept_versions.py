"""Copies of tracked state in a rank's own memory, for the guard to go back to.

That an update was bad (a gradient that is NaN under a loss that is not) shows in the next loss only. So a version is on
trial until a loss that was computed from it was allowed, and before that is nothing to go back to.
"""

from __future__ import annotations

from collections import deque

import torch

from trainer_hooks.python_state import Merged, decode
from trainer_hooks.snapshot.blob import Blob
from trainer_hooks.state import TrackedState, TrackedTensor

_Form = tuple[object, ...]


class KeptVersion:
    """A copy of this rank's tracked state, as it was before some data step.

    ``forms``: what each of ``tensors`` is a copy of. ``stateful``: the parameters for which each optimizer had state.
    """

    def __init__(
        self,
        forms: list[_Form],
        tensors: list[torch.Tensor],
        stateful: list[set[torch.Tensor]],
        blob: Blob,
        data_step: int,
    ) -> None:
        self.forms = forms
        self.tensors = tensors
        self.stateful = stateful
        self.blob = blob
        self.data_step = data_step


class KeptVersions:
    """At most ``count`` that are proven, and one on trial."""

    def __init__(self, state: TrackedState, count: int) -> None:
        self._state = state
        self._count = count
        self._tracked: list[TrackedTensor] = []
        self._proven: deque[KeptVersion] = deque()
        self._trial: KeptVersion | None = None
        self._spare: KeptVersion | None = None

    @property
    def oldest(self) -> KeptVersion | None:
        """The oldest that is proven; without any the one on trial."""
        return self._proven[0] if self._proven else self._trial

    def keep(self, data_step: int) -> None:
        """The state as it is, before ``data_step``: on trial."""
        self._drop_trial()
        tracked, spare = self._look(), self._spare
        forms, live = [_form(tensor) for tensor in tracked], _live(tracked)
        self._spare = None
        fits = spare is not None and spare.forms == forms
        room = spare.tensors if spare is not None and fits else [torch.empty_like(tensor) for tensor in live]
        _copy(room, live)
        stateful = [set(optimizer.state) for optimizer in self._state.optimizers]
        self._trial = KeptVersion(forms, room, stateful, self._state.taken(), data_step)

    def prove(self) -> None:
        """A loss that was computed from the version on trial is good."""
        if self._trial is None:
            return
        self._proven.append(self._trial)
        self._trial = None
        if len(self._proven) > self._count:
            self._spare = self._proven.popleft()

    def clear(self) -> None:
        """What is tracked is another state than was kept."""
        self._proven.clear()
        self._trial = self._spare = None

    def can_go_back(self) -> bool:
        """Whether there is one, of the tensors that are tracked now. Optimizer state may have come since."""
        version = self.oldest
        return version is not None and [_form(tensor) for tensor in self._then(version)] == version.forms

    def go_back(self) -> KeptVersion:
        """To the oldest, where ``can_go_back``; newer ones are forgotten. The caller has asked for tracked state."""
        version = self.oldest
        assert version is not None, "can_go_back was asked"
        if self._proven:
            self._drop_trial()
            self._proven = deque([version])
        _copy(_live(self._then(version)), version.tensors)
        for optimizer, had in zip(self._state.optimizers, version.stateful, strict=True):
            for parameter in optimizer.state.keys() - had:
                del optimizer.state[parameter]
        self._state.load_python(Merged([decode(version.blob.data())], self._state.python_names()))
        return version

    def _drop_trial(self) -> None:
        if self._trial is not None:
            self._spare, self._trial = self._trial, None

    def _look(self) -> list[TrackedTensor]:
        if not self._tracked or not self._state.unchanged():
            self._tracked = self._state.tensors()
        return self._tracked

    def _then(self, version: KeptVersion) -> list[TrackedTensor]:
        """What is tracked now, but optimizer state of parameters that had none."""
        since = {
            id(optimizer.state[parameter])
            for optimizer, had in zip(self._state.optimizers, version.stateful, strict=True)
            for parameter in optimizer.state.keys() - had
        }
        return [tensor for tensor in self._look() if id(tensor.place) not in since]


def _form(tensor: TrackedTensor) -> _Form:
    return tensor.name, tensor.shape, tensor.box, tensor.local.dtype, tensor.local.device


def _live(tracked: list[TrackedTensor]) -> list[torch.Tensor]:
    return [tensor.now() if tensor.volatile else tensor.local for tensor in tracked]


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if of:  # torch takes no empty lists
        with torch.no_grad():
            torch._foreach_copy_(to, of)
