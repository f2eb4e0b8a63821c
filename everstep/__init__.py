"""Keep a PyTorch training function stepping through ranks that die, hang or compute wrong results.

Example::

    import everstep

    def train(run: everstep.Run) -> None:
        model = run.replicate(Model().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = run.loader(dataset, global_batch=32)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=1000):
            optimizer.zero_grad()
            loss = model(loader.batch(step)).mean()
            (loss * loader.loss_weight(step)).backward()
            optimizer.step()

    if __name__ == "__main__":
        everstep.main(train)

Start the script with ``everstep-launch train.py`` to make the run survive failures. Under ``python train.py`` or
torchrun it runs as an ordinary script.

The submodules of this package are the contract that agent, controller and trainer share: messages, names, the layout
of checkpoint memory, errors and clocks. The names in ``__all__`` come from ``everstep_trainer`` and are imported on
first use, so that agents and controllers never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_trainer.base.interrupt import Regroup
    from everstep_trainer.config import HookSettings
    from everstep_trainer.data.sampler import ElasticSampler
    from everstep_trainer.entry_point import main
    from everstep_trainer.run import Run
    from everstep_trainer.sdc.replay.determinism import unrepeatable_modules

__version__ = "0.1.0"
__all__ = ["ElasticSampler", "HookSettings", "Regroup", "Run", "main", "unrepeatable_modules"]

_DEFINED_IN = {
    "ElasticSampler": "everstep_trainer.data.sampler",
    "HookSettings": "everstep_trainer.config",
    "Regroup": "everstep_trainer.base.interrupt",
    "Run": "everstep_trainer.run",
    "main": "everstep_trainer.entry_point",
    "unrepeatable_modules": "everstep_trainer.sdc.replay.determinism",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that agents and controllers never load torch."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)
