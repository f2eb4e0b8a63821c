"""Find modules whose passes do not give the same bits when they are computed twice, and compare those by tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils import _pytree as pytree

from everstep_trainer.sdc.replay.call_replay import replay, untouched
from everstep_trainer.sdc.replay.capture import Capture, CapturedCall, PassRecord, UnsupportedUnit
from everstep_trainer.sdc.replay.units import Unit
from everstep_trainer.state.tracked_objects import strip_wrapper_names

REPEATS = 3
"""How often a call is done again to see whether its results vary."""
SPREADS = 8.0
"""How many times the difference of two replays is tolerated."""
ROUNDINGS = 64.0
"""How many roundings, relative to the largest element, are tolerated."""


def unrepeatable_modules(model: nn.Module, *inputs: object, repeats: int = REPEATS) -> dict[str, str]:
    """Return the modules of ``model`` that do not compute the same bits from the same inputs.

    One forward and one backward pass are made. Then the passes of each module without submodules are done again with
    the same inputs, gradients and random numbers. Parameters, ``.grad``, buffers and random states are as before
    afterwards. Run it on the kind of device that will train: on GPUs, kernels that add with atomics vary.

    Example::

        for name, results in everstep.unrepeatable_modules(model, tokens).items():
            print(f"{name} is not repeatable: {results}")

    Args:
        model: The model, on its device; not wrapped in DistributedDataParallel or ``fully_shard``.
        inputs: Arguments of its forward pass.
        repeats: How often each pass is done again; a rare variation needs more.

    Returns:
        For each module by name what varied, such as ``"output 0, gradient of weight"``. The name ``""`` stands for code
        of containers, between their modules.
    """
    tensors = [*model.parameters(), *(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))]
    device = tensors[0].device if tensors else torch.device("cpu")
    whole = Unit("", model)
    capture = Capture(whole, 0, device)
    with untouched(model, dict(model.named_buffers()), device):
        capture.install()
        try:
            _run_passes(model, inputs)
        finally:
            capture.remove()
    if capture.captured is None:
        raise ValueError(f"the model cannot be computed again: {capture.problem}")
    return find_unrepeatable(whole, capture.captured, device, repeats)


def _run_passes(model: nn.Module, inputs: Sequence[object]) -> None:
    """Compute gradients without accumulating them."""
    with torch.enable_grad():
        outputs = model(*inputs)
        given = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if given and trained:
            ones = [torch.ones_like(output) for output in given]
            torch.autograd.grad(given, trained, ones, allow_unused=True)


def find_unrepeatable(
    unit: Unit, captured: CapturedCall, device: torch.device, repeats: int = REPEATS
) -> dict[str, str]:
    """Return the modules inside a unit that vary, as ``unrepeatable_modules`` does.

    Raises:
        UnsupportedUnit: The unit cannot be replayed.
    """
    inner = [
        Unit(strip_wrapper_names(name), module)
        for name, module in unit.module.named_modules()
        if next(module.children(), None) is None or isinstance(module, OptimizedModule)
    ]
    captures = [Capture(module, 0, device) for module in inner]
    with ExitStack() as stack:
        for capture in captures:
            capture.install()
            stack.callback(capture.clear)
        records = [replay(unit, captured, device)]
        for capture in captures:
            capture.remove()
        found: dict[str, str] = {}
        for capture in captures:
            if capture.captured is None or (capture.unit.module is unit.module):
                continue
            try:
                varied = varied_results([replay(capture.unit, capture.captured, device) for _ in range(repeats)])
            except (UnsupportedUnit, RuntimeError):
                continue
            if varied:
                found[capture.unit.name] = varied
    records += [replay(unit, captured, device) for _ in range(repeats - 1)]
    if not found and (varied := varied_results(records)):
        found[""] = varied
    return found


def varied_results(records: Sequence[PassRecord]) -> str:
    """Return the names of results that differ between records of the same passes, or an empty string."""
    names: dict[str, None] = {}
    for results in zip(*(record.digests for record in records), strict=True):
        values = {None if digest is None else int(digest.item()) for digest in results}
        if len(values) > 1:
            number = next(n for n, digest in enumerate(records[0].digests) if digest is results[0])
            names[records[0].items[number].name] = None
    return ", ".join(names)


# ---- comparison by tolerance


def relative_spread(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest element of its tensor."""
    return max((_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def are_close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], spread: float) -> bool:
    """Return whether tensors differ by no more than a few roundings, or by what two replays differed (``spread``)."""
    return all(
        _difference(a, b) <= max(SPREADS * spread, ROUNDINGS * _rounding(a)) for a, b in zip(one, other, strict=True)
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.numel() or torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        return float("inf")
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((a.isfinite() & b.isfinite() | same).all()):
        return float("inf")
    scale = a.where(a.isfinite(), 0.0).abs().max().item()
    gap = (a - b).where(~same, 0.0).abs().max().item()
    return gap / scale if scale else (float("inf") if gap else 0.0)


def _rounding(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
