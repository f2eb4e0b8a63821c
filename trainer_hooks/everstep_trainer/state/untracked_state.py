"""Warn before the first step of state in tracked objects that is not stored, and refuse what cannot be.

A module's parameters, buffers and extra state are stored. Values that its hooks or methods add to ``state_dict()`` are
not, and neither are parameters that an optimizer trains but no tracked module holds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from everstep.errors import ConfigurationError
from everstep_trainer.digests.digest import WeightedDigest
from everstep_trainer.state import python_state
from everstep_trainer.state.python_value_codec import KEEP_TENSORS_IN, MAX_BLOB_BYTES, encode_blob
from everstep_trainer.state.tensors import Exclusions, list_names, local_part
from everstep_trainer.state.tracked_objects import TrackedObjects, named_modules, strip_wrapper_names

# ---- state of replicated models that no restore brings: excluded tensors, non-persistent buffers, untracked modules
#
# DistributedDataParallel's constructor broadcasts rank 0's state. If a version will be restored, the broadcast is
# skipped. The restore makes replicas equal, but for the state above, which each rank's program made for itself.


class ReplicaSync:
    """The replicated models of a generation that restores a version."""

    def __init__(self) -> None:
        self._models: list[tuple[nn.Module, frozenset[str], dist.ProcessGroup | None]] = []

    def add_model(
        self, model: nn.Module, group: dist.ProcessGroup | None = None, *, ignored: Iterable[str] = ()
    ) -> None:
        """Add a model with replicas on the ranks of ``group`` (None: all); ``ignored`` names belong to one rank."""
        self._models.append((model, frozenset(ignored), group))

    def broadcast(self, objects: Mapping[str, object], exclude: Iterable[str], running: Collection[str] = ()) -> None:
        """Broadcast rank 0's values of what the restore left out, if digests differ. A collective.

        ``running``: Names of restored buffers that are not persistent.
        """
        restored = {id(tensor) for tensor in _restored(objects, exclude, running)}
        for model, ignored, group in self._models:
            tensors = [tensor for tensor in replicated_tensors(model, ignored) if id(tensor) not in restored]
            if tensors:
                own = WeightedDigest(tensors).enqueue().reshape(1)
                digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                dist.all_gather(digests, own, group=group)
                if len(set(torch.cat(digests).tolist())) > 1:
                    broadcast_first_rank(tensors, group)


def _restored(
    objects: Mapping[str, object], exclude: Iterable[str], running: Collection[str]
) -> Iterator[torch.Tensor]:
    exclusions = Exclusions(exclude)
    for top, root in TrackedObjects(objects).modules:
        for name, module in named_modules(top, root):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                full = f"{name}.{key}"
                stored = key not in module._non_persistent_buffers_set or full in running
                if tensor is not None and stored and not exclusions.excludes(full):
                    yield tensor


def replicated_tensors(model: nn.Module, ignored: frozenset[str] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the model's dense parameters and buffers; shards are no replicas."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dense = not isinstance(tensor, DTensor) and not is_lazy(tensor) and tensor.layout is torch.strided
        if dense and tensor.numel() and name not in ignored:
            yield tensor


def broadcast_first_rank(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the values of the group's first rank. A collective."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=first, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


log = logging.getLogger(__name__)

MAX_SHOWN = 3


def check_untracked(objects: Mapping[str, object]) -> None:
    """Raise ValueError if an optimizer trains untracked parameters; warn of values in a ``state_dict()`` not stored."""
    tracked = TrackedObjects(objects)
    held = {id(parameter) for _, module in tracked.modules for parameter in module.parameters()}
    for top, optimizer in tracked.optimizers:
        strays = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
        if strays:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in strays[:MAX_SHOWN])
            raise ValueError(
                f"{top} trains {len(strays)} parameters that are in no tracked module (of shape {shapes}): their "
                "values would not be stored. Track the module that holds them, such as a loss with weights, or a "
                "torch.nn.ParameterList([...]) of them; and make optimizers after calls that replace parameters, such "
                "as fully_shard"
            )
    for top, module in tracked.modules:
        if names := list(_untracked_names(module)):
            log.warning(
                "%s has %s in its state_dict(), which are none of its parameters and buffers, so they are not "
                "stored and start again after a loss. Return them from get_extra_state, hold them in buffers, or track "
                "them as an object of their own",
                top,
                list_names(names, MAX_SHOWN),
            )


def require_storable(objects: Mapping[str, object]) -> None:
    """Refuse objects with a ``state_dict()`` that cannot be stored as Python state, before the first step.

    Raises:
        TypeError: A value is of a type that is not stored; its path is named.
        ConfigurationError: The values take more than MAX_BLOB_BYTES.
    """
    for key, tracked in TrackedObjects(objects).others.items():
        try:
            state = python_state.get_state_dict(tracked)
        except Exception:  # raised by the object's own code, which may work only between steps
            log.info("the state_dict() of %s cannot be checked now", key, exc_info=True)
            continue
        nbytes, path = _largest_tensors(state, key)
        if nbytes > MAX_BLOB_BYTES:
            raise ConfigurationError(
                f"the state_dict() of {key} holds {nbytes} bytes of tensors, mostly in {path}, and objects that are "
                f"no modules are stored up to {MAX_BLOB_BYTES} bytes: {KEEP_TENSORS_IN}"
            )
        encode_blob(state, key)


def _largest_tensors(value: object, path: str) -> tuple[int, str]:
    """Return the bytes of all tensors in nested state, and the path of the list or dictionary that holds the most."""
    if isinstance(value, torch.Tensor):
        return value.nbytes, path
    members: Iterable[tuple[object, object]] = enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        members = value.items()
    found = [_largest_tensors(member, f"{path}[{key!r}]") for key, member in members]
    if not found:
        return 0, path
    total, (most, inside) = sum(nbytes for nbytes, _ in found), max(found)
    return total, inside if 2 * most > total else path


def _untracked_names(root: nn.Module) -> Iterator[str]:
    """Yield names in a custom ``state_dict()`` whose values share no memory with stored tensors.

    Copies that replace stored tensors are none of them: a module may fuse projections and save them one by one.
    """
    if not any(map(_has_custom_state_dict, root.modules())):
        return
    try:
        state = root.state_dict(keep_vars=True)
    except Exception:  # raised by the module's own code, which may work only at other times
        log.info("the state_dict() of a %s cannot be checked now", type(root).__qualname__, exc_info=True)
        return
    stored = {_memory(tensor) for tensor in (*root.parameters(), *root.buffers())}
    unknown = {
        name: value
        for name, value in state.items()
        if not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
        and (not isinstance(value, torch.Tensor) or (value.numel() and _memory(value) not in stored))
    }
    if not _replace_stored(unknown.values(), root, state.values()):
        yield from map(strip_wrapper_names, unknown)


def _replace_stored(unknown: Collection[object], root: nn.Module, values: Iterable[object]) -> bool:
    """Return whether ``unknown`` values have as many elements as the stored tensors that are not among ``values``."""
    present = {_memory(value) for value in values if isinstance(value, torch.Tensor)}
    persistent = (
        tensor
        for module in root.modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and key not in module._non_persistent_buffers_set
    )
    absent = {id(tensor): tensor.numel() for tensor in persistent if _memory(tensor) not in present}
    if not all(isinstance(value, torch.Tensor) for value in unknown):
        return False
    return sum(value.numel() for value in unknown if isinstance(value, torch.Tensor)) == sum(absent.values())


def _has_custom_state_dict(module: nn.Module) -> bool:
    kind = type(module)
    own = (kind.state_dict, kind._save_to_state_dict) != (nn.Module.state_dict, nn.Module._save_to_state_dict)
    return own or bool(module._state_dict_hooks)


def _memory(tensor: torch.Tensor) -> int:
    """Return a key that a tensor shares with its views."""
    local = local_part(tensor)
    if is_lazy(local) or local.layout is not torch.strided:
        return id(tensor)
    return local.untyped_storage().data_ptr() or id(tensor)
