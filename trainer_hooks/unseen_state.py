"""What tracked objects have that is not found where state is looked for, told before the first step.

Of a module its parameters, buffers and extra state are stored. What it adds to ``state_dict()`` by a hook, or by a
method of its own, is not; nor are parameters that an optimizer trains and no tracked module holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from trainer_hooks.module_names import unwrapped
from trainer_hooks.tracked_objects import TrackedObjects

log = logging.getLogger(__name__)

SHOWN = 3


def look_for_unseen(objects: Mapping[str, object]) -> None:
    """Raises ValueError for an optimizer with parameters in no tracked module, and warns, by name, of what modules say
    in ``state_dict()`` that is none of their tensors."""
    tracked = TrackedObjects(objects)
    held = {id(parameter) for _, module in tracked.modules for parameter in module.parameters()}
    for top, optimizer in tracked.optimizers:
        strays = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
        if strays:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in strays[:SHOWN])
            raise ValueError(
                f"{top} trains {len(strays)} parameters that are in no tracked module (of shape {shapes}): their "
                "values would not be stored. Track what holds them, such as a loss with weights of its own, or "
                "torch.nn.ParameterList([...]) of them; and make an optimizer after what replaces parameters, such as "
                "fully_shard"
            )
    for top, module in tracked.modules:
        if names := list(_unseen(module)):
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            log.warning(
                "%s has %s%s in its state_dict(), which are none of its parameters and buffers. Only these are stored: "
                "what cannot be made from them begins anew after a loss. Give it by get_extra_state, hold it in a "
                "buffer, or track an object of its own that has it",
                top,
                ", ".join(names[:SHOWN]),
                more,
            )


def _unseen(root: nn.Module) -> Iterator[str]:
    """Names in ``state_dict()`` whose values share no memory with what is stored; asked only where somebody changes
    what it says, since torch's own says nothing else."""
    if not any(map(_says_more, root.modules())):
        return
    try:
        said = root.state_dict(keep_vars=True)
    except Exception:  # of the module's own code, which may work at other times only
        log.info("the state_dict() of a %s cannot be looked at now", type(root).__qualname__, exc_info=True)
        return
    stored = {_memory(tensor) for tensor in (*root.parameters(), *root.buffers())}
    for name, value in said.items():
        if name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            continue
        if not isinstance(value, torch.Tensor) or (value.numel() and _memory(value) not in stored):
            yield unwrapped(name)


def _says_more(module: nn.Module) -> bool:
    kind = type(module)
    own = (kind.state_dict, kind._save_to_state_dict) != (nn.Module.state_dict, nn.Module._save_to_state_dict)
    return own or bool(module._state_dict_hooks)


def _memory(tensor: torch.Tensor) -> int:
    """What a tensor has in common with its views."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if is_lazy(local) or local.layout is not torch.strided:
        return id(tensor)
    return local.untyped_storage().data_ptr() or id(tensor)
