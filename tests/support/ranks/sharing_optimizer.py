"""An optimizer whose parameters share a part of their state."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class SharingOptimizer(torch.optim.Optimizer):
    """An optimizer with one counter for all parameters, an average for each, and the first parameter as an anchor."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        first = group["params"][0]
        if not self.state:
            counter = torch.zeros(())
            for parameter in group["params"]:
                self.state[parameter] = {"step": counter, "average": torch.zeros_like(parameter)}
            self.state[first]["anchor"] = first.detach()
        self.state[first]["step"] += 1
        for parameter in group["params"]:
            self.state[parameter]["average"] += self.state[parameter]["step"]
            parameter -= self.state[parameter]["average"]
