"""Names of a model's parts as they would be, had nobody wrapped them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

_INSIDE = ".module"
"""Where DistributedDataParallel has what it replicates."""
_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


def unwrapped(name: str) -> str:
    """``name`` without what torch's wrappers that have a name of their own add to it."""
    return _WRAPPERS.sub("", name)


def named_modules(
    top: str, root: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """``root.named_modules``, named below ``top`` as without compilation, checkpointing and DistributedDataParallel,
    wherever they stand: a model that is compiled around its replica has the names that it has on one rank alone.

    A wrapper and what is in it have one name.
    """
    replicas: list[str] = []
    for name, module in root.named_modules(prefix=top, remove_duplicate=remove_duplicate):
        bare = name
        for replica in reversed(replicas):
            inside = replica + _INSIDE
            if name == inside or name.startswith(f"{inside}."):
                bare = replica + bare[len(inside) :]
        if isinstance(module, DistributedDataParallel):
            replicas.append(name)
        yield unwrapped(bare), module


def replicas_in(top: str, root: torch.nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Those parts, with their names."""
    for name, module in named_modules(top, root):
        if isinstance(module, DistributedDataParallel):
            yield name, module
