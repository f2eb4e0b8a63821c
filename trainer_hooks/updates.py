"""What is asked before tracked optimizers update, for as long as one run lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trainer_hooks.tracked_objects import several

log = logging.getLogger(__name__)

LOOKED_AT = 2
"""Steps after which every optimizer has the state that it will have."""
LOOKED_FOR_SUMS = 32
"""Steps of a generation in which it is counted how many had no update."""


class Updates:
    """Calls ``ask`` before each step of optimizers, until ``close``: one that outlives a generation is asked for by the
    next one's. ``where``: fields for the log."""

    def __init__(self, ask: Callable[[], None], where: Mapping[str, object]) -> None:
        self._ask = ask
        self._where = dict(where)
        self._hooks: list[RemovableHandle] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._updated = False
        self._steps = self._without = 0

    def watch(self, objects: Mapping[str, object]) -> None:
        """The optimizers among tracked objects, listed ones too.

        Of models that outlived a generation the gradients go: a new process has none of the step that was interrupted.
        """
        for key, tracked in objects.items():
            for one in several(tracked):
                if isinstance(one, torch.optim.Optimizer):
                    one.zero_grad()
                    self._optimizers.append(one)
                    self._hooks.append(one.register_step_pre_hook(self._before(key)))

    def step_finished(self) -> None:
        """Warns, once, of gradients that are added up over steps of the run: no version has them.

        Updates that a loss scaler or a guard leaves out are few, and no reason.
        """
        self._steps += 1
        updated, self._updated = self._updated, False
        if self._steps > LOOKED_FOR_SUMS or not self._optimizers:
            return
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        if not updated and any(parameter.grad is not None for parameter in trained):
            self._without += 1
        if self._steps == LOOKED_FOR_SUMS and 2 * self._without >= self._steps:
            log.warning(
                "in %d of %d steps there were gradients and no update by a tracked optimizer: gradients that are added "
                "up over several steps are not stored, and are lost with any rank. Let each step of the run end with "
                "an update: split its samples into micro-batches inside it",
                self._without,
                self._steps,
                extra=self._where,
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, key: str) -> Callable[..., None]:
        steps = count()

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._ask()
            self._updated = True
            if next(steps) == LOOKED_AT and not optimizer.state and optimizer.state_dict().get("state"):
                log.warning(
                    "%s, a %s, has no state where torch's optimizers have it, so the state that its state_dict() gives "
                    "is not stored: track the optimizer inside it, or use another one",
                    key,
                    type(optimizer).__qualname__,
                    extra=self._where,
                )

        outside: Callable[..., None] = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        return outside  # what it counts is no part of a compiled step
