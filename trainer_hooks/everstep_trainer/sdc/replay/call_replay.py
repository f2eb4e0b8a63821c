"""Do a captured call of a unit again, on any rank, and leave no trace of that in the state of training."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils import _pytree as pytree

from everstep_trainer.data.rng import get_host_rng_state, set_host_rng_state
from everstep_trainer.sdc.replay.capture import (
    CapturedCall,
    PassRecord,
    TensorPlace,
    UnsupportedUnit,
    rng_states,
    set_rng_states,
)
from everstep_trainer.sdc.replay.units import Unit

_replays = 0  # of this process, nested


def is_replaying() -> bool:
    """Return whether a captured call is being done again: hooks of other audits must ignore what they see then."""
    return _replays > 0


def replay(unit: Unit, captured: CapturedCall, device: torch.device) -> PassRecord:
    """Compute the captured call again and return its results, without ``.grad`` of any parameter.

    The unit's parameters must be whole (`Unit.gathered`) and equal to those of the capture. The hooks of DDP and of
    ``fully_shard`` stay silent: ``forward`` is called directly, and gradients are not accumulated. Random states,
    buffers and attributes of the modules are as before afterwards.

    Raises:
        UnsupportedUnit: The call cannot be done again.
    """
    module = unit.module
    record = PassRecord(module, outputs_only=captured.record.outputs_only)
    with untouched(module, captured.buffers, device):
        try:
            _replay_into(record, unit, captured, device)
        finally:
            record.release()
    if record.structure() != captured.record.structure():
        raise UnsupportedUnit("its backward pass consists of other operations when it is done again")
    return record


def _replay_into(record: PassRecord, unit: Unit, captured: CapturedCall, device: torch.device) -> None:
    buffers = dict(unit.module.named_buffers())
    for name, snapshot in captured.buffers.items():
        buffers[name].data.copy_(snapshot.tensor(copy=False))
    for module, mode in zip(unit.module.modules(), captured.modes, strict=True):
        module.training = mode
    set_rng_states(captured.rng, device)
    leaves = [snapshot.tensor().requires_grad_(snapshot.layout.requires_grad) for snapshot in captured.inputs]
    with torch.enable_grad():
        inputs = [_behind_a_node(leaf) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(
        [inputs[leaf.number] if isinstance(leaf, TensorPlace) else leaf for leaf in captured.leaves], captured.spec
    )
    with torch.set_grad_enabled(captured.grad_enabled), captured.forward_autocast.applied():
        record.begin(inputs)
        record.finish_forward(_callable(unit)(*args, **kwargs))
    if captured.has_gradients and not record.outputs_only:
        given = [
            (output, snapshot.tensor())
            for output, snapshot in zip(record.outputs, captured.output_gradients, strict=True)
            if snapshot is not None
        ]
        targets = [leaf for leaf in [*leaves, *unit.module.parameters()] if leaf.requires_grad]
        with captured.backward_autocast.applied():
            outputs, gradients = [output for output, _ in given], [gradient for _, gradient in given]
            torch.autograd.grad(outputs, targets, gradients, allow_unused=True)


def _behind_a_node(leaf: torch.Tensor) -> torch.Tensor:
    """Return an input that the forward pass may change in place, as training's own inputs, with equal strides."""
    if not leaf.requires_grad:
        return leaf
    copy = leaf.clone()
    return copy if copy.stride() == leaf.stride() else leaf.view_as(leaf)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _callable(unit: Unit) -> Callable[..., Any]:
    module = unit.module
    if not unit.is_compiled_in_place:
        forward: Callable[..., Any] = module.forward
        return forward
    for name in _HOOKS:  # restored with all attributes
        setattr(module, name, OrderedDict())
    compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
    return compiled


@contextmanager
def untouched(module: nn.Module, buffers: Iterable[str], device: torch.device) -> Iterator[None]:
    """Restore what a forward pass changes: random states, the named buffers, and attributes of the modules."""
    global _replays
    host, states = get_host_rng_state(), rng_states(device)
    found = dict(module.named_buffers())
    copies = [(found[name], found[name].detach().clone()) for name in buffers]
    tables = [
        table
        for submodule in module.modules()
        for table in (vars(submodule), submodule._buffers)
        if _is_plain(submodule)
    ]
    kept = [(table, dict(table)) for table in tables]
    changes = [undo for submodule in module.modules() if _is_plain(submodule) for undo in _copy_attributes(submodule)]
    _replays += 1
    try:
        yield
    finally:
        _replays -= 1
        for table, before in kept:
            for key in [key for key in table if key not in before]:
                del table[key]
            for key, value in before.items():
                if table.get(key, table) is not value:
                    table[key] = value
        for undo in changes:
            undo()
        for buffer, copy in copies:
            buffer.data.copy_(copy)
        set_rng_states(states, device)
        set_host_rng_state(host)


_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module()))


def _copy_attributes(module: nn.Module) -> Iterator[Callable[[], object]]:
    """Copy tensors and containers that a module holds as plain attributes, such as counts and lists of losses.

    Yields:
        Functions that give them their present content again.
    """
    for name, value in vars(module).items():
        if name in _ATTRIBUTES_OF_TORCH:
            continue
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and value.layout is torch.strided:
                yield partial(value.data.copy_, value.detach().clone())
        elif isinstance(value, list | deque):
            yield partial(_refill, value, value.extend, list(value))
        elif isinstance(value, dict | set):
            yield partial(_refill, value, value.update, value.copy())


def _refill(
    container: list[Any] | deque[Any] | dict[Any, Any] | set[Any], add: Callable[[Any], object], content: Any
) -> None:
    container.clear()
    add(content)


def _is_plain(module: nn.Module) -> bool:
    return not isinstance(module, OptimizedModule)
