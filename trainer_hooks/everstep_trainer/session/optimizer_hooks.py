"""Hooks on the tracked optimizers: wait for the snapshot before each update, and warn of state that is not stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from everstep_trainer.base.injected_flip import flip_if_requested
from everstep_trainer.state.tracked_objects import as_list

log = logging.getLogger(__name__)

STEPS_UNTIL_STATE_CHECK = 2  # updates after which an optimizer holds all the state that it will ever hold
ACCUMULATION_CHECK_STEPS = 32  # first steps of a generation over which steps without an update are counted


class OptimizerHooks:
    """Calls ``before_update`` before each step of the watched optimizers, which may outlive the generation."""

    def __init__(self, before_update: Callable[[], None], log_fields: Mapping[str, object]) -> None:
        self._before_update = before_update
        self._log_fields = dict(log_fields)
        self._hooks: list[RemovableHandle] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._updated = False
        self._steps = self._steps_without_update = 0

    def watch(self, objects: Mapping[str, object]) -> None:
        """Hook the optimizers among tracked objects, and clear the gradients that the interrupted step left."""
        for key, tracked in objects.items():
            for part in as_list(tracked):
                if isinstance(part, torch.optim.Optimizer):
                    part.zero_grad()
                    self._optimizers.append(part)
                    self._hooks.append(part.register_step_pre_hook(self._before(key)))

    def step_finished(self) -> None:
        """Warn once if gradients are accumulated over several steps of the run: no version contains gradients."""
        self._steps += 1
        updated, self._updated = self._updated, False
        if self._steps > ACCUMULATION_CHECK_STEPS or not self._optimizers:
            return
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        if not updated and any(parameter.grad is not None for parameter in trained):
            self._steps_without_update += 1
        if self._steps == ACCUMULATION_CHECK_STEPS and 2 * self._steps_without_update >= self._steps:
            log.warning(
                "in %d of %d steps there were gradients and no update by a tracked optimizer: gradients accumulated "
                "over several steps are not stored, and are lost with any rank. End each step of the run with an "
                "update: split its samples into micro-batches inside it",
                self._steps_without_update,
                self._steps,
                extra=self._log_fields,
            )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, key: str) -> Callable[..., None]:
        steps = count()

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._before_update()
            flip_if_requested(optimizer)
            self._updated = True
            if next(steps) == STEPS_UNTIL_STATE_CHECK and not optimizer.state and optimizer.state_dict().get("state"):
                log.warning(
                    "%s, a %s, does not keep its state in optimizer.state, so the state in its state_dict() is not "
                    "stored: track the optimizer inside it, or use another one",
                    key,
                    type(optimizer).__qualname__,
                    extra=self._log_fields,
                )

        outside: Callable[..., None] = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        return outside  # counting updates is no part of a compiled step
