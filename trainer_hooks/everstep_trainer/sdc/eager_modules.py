"""Find the modules whose forward pass an audit can watch with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from everstep_trainer.state.tracked_objects import as_list


def eager_leaf_modules(objects: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the tracked modules without children that are not compiled, whose hooks would compile them anew."""
    for key, tracked in objects.items():
        for module in as_list(tracked):
            if isinstance(module, nn.Module):
                yield from _leaves(key, module)


def _leaves(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
        return
    children = list(module.named_children())
    if not children and not isinstance(module, nn.modules.dropout._DropoutNd):
        yield name, module
    for key, child in children:
        yield from _leaves(f"{name}.{key}", child)
