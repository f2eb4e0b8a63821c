"""Page of the Python API: a mkdocstrings directive for every public name."""

from __future__ import annotations

import everstep

_FIRST = ("main", "Run")
_MODULES = {
    "Checkpoints by torch.distributed.checkpoint": "everstep_trainer.memory_tier.dcp",
    "PyTorch Lightning": "everstep_trainer.integrations.lightning",
    "Lightning Fabric": "everstep_trainer.integrations.fabric",
    "Hugging Face Transformers": "everstep_trainer.integrations.transformers",
    "Ray Train": "everstep_trainer.integrations.ray",
    "DeepSpeed": "everstep_trainer.integrations.deepspeed",
    "JAX": "everstep_trainer.integrations.jax",
    "Orbax": "everstep_trainer.integrations.orbax",
    "Hugging Face Accelerate": "everstep_trainer.integrations.accelerate",
}
_BARE = "\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n      heading_level: 3"
"""Options of a module whose heading stands above it already."""


def page() -> str:
    """Return the page."""
    names = sorted(everstep.__all__, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    parts = [
        "# Python API\n\nA training script imports `everstep`; nothing else of it is needed for an ordinary run. "
        "[The training function](training-function.md) explains how the parts belong together.\n"
    ]
    parts += [f"::: everstep.{name}\n" for name in names]
    parts += [f"## {title}\n\n`{module}`\n\n::: {module}{_BARE}\n" for title, module in _MODULES.items()]
    return "\n".join(parts)
