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


class Updates:
    """Calls ``ask`` before each step of optimizers, until ``close``: one that outlives a generation is asked for by the
    next one's. ``where``: fields for the log."""

    def __init__(self, ask: Callable[[], None], where: Mapping[str, object]) -> None:
        self._ask = ask
        self._where = dict(where)
        self._hooks: list[RemovableHandle] = []

    def watch(self, objects: Mapping[str, object]) -> None:
        """The optimizers among tracked objects, listed ones too."""
        for key, tracked in objects.items():
            for one in several(tracked):
                if isinstance(one, torch.optim.Optimizer):
                    self._hooks.append(one.register_step_pre_hook(self._before(key)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, key: str) -> Callable[..., None]:
        steps = count()

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._ask()
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
