"""Keeps a PyTorch training function stepping through ranks that die, hang or lie.

::

    import trainer_hooks as everstep

    def train(run: everstep.Run) -> None:
        model = run.replicate(Model().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = run.sampler(len(data), global_batch=32)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=1000):
            ...

    if __name__ == "__main__":
        everstep.main(train)

Started by ``everstep-launch train.py`` the run survives; by ``python train.py`` or torchrun it just runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_hooks.config import HookSettings
    from trainer_hooks.data import ElasticSampler
    from trainer_hooks.entry import main
    from trainer_hooks.interrupt import Regroup
    from trainer_hooks.run import Run

__all__ = ["ElasticSampler", "HookSettings", "Regroup", "Run", "main"]

_HOMES = {
    "ElasticSampler": "data",
    "HookSettings": "config",
    "Regroup": "interrupt",
    "Run": "run",
    "main": "entry",
}


def __getattr__(name: str) -> Any:
    """Public names on first use: the launcher imports this package without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
