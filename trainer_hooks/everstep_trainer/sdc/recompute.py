"""Compare what modules computed in the forward pass and again in activation recomputation.

Activation checkpointing runs a part of the forward pass twice, so its second result costs nothing. Equal inputs must
give equal bits. torch ends the recomputation once it has all saved tensors, so the last product of a checkpointed part
is not seen; `everstep_trainer.sdc.matmul` and `everstep_trainer.sdc.replay.peer_replay` check it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.audit import Audit, AuditSetup, is_in_backward
from everstep_trainer.sdc.digests.digest import combined_digest, to_hex
from everstep_trainer.state.tracked_objects import as_list

log = logging.getLogger(__name__)

AUDITS_WITHOUT_RECOMPUTATION = 3
"""Due audits without any recomputation after which the link switches itself off."""
RERUNS = 2


class Recompute(Audit):
    """AuditLink.RECOMPUTE on one rank: digests of the outputs of all modules without children."""

    link = AuditLink.RECOMPUTE

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        self._modules = dict(eager_leaf_modules(setup.objects))
        self._hooks: list[RemovableHandle] = []
        self._digests: dict[str, list[torch.Tensor]] = {}  # of the forward passes of this step, by module
        self._compared: list[tuple[str, torch.Tensor, list[torch.Tensor], _Call]] = []
        self._unrepeatable: set[str] = set()
        self._idle_audits = 0

    def begin_step(self, step: int, *, due: bool) -> None:
        if due and self._idle_audits < AUDITS_WITHOUT_RECOMPUTATION:
            for name, module in self._modules.items():
                if name not in self._unrepeatable:
                    self._hooks.append(module.register_forward_hook(self._hook_of(name), with_kwargs=True))

    def before_update(self, step: int, *, due: bool) -> None:
        if not self._hooks:
            return
        self.close()
        self._idle_audits = 0 if self._compared else self._idle_audits + 1
        for name, again, originals, call in self._compared:
            # Micro-batches may be recomputed in any order, so any forward pass of the module may be the right one.
            if not bool((torch.stack(originals) == again).any()):
                self._judge(step, name, again, originals, call)
        self._compared.clear()
        self._digests.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook_of(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not torch.is_grad_enabled():  # an evaluation, or a reentrant forward pass, which is not recomputed alike
                return
            with self.cost(), torch.no_grad():
                tensors = tensors_in(output)
                if not tensors:
                    return
                digest = combined_digest(tensors)
                if not is_in_backward():
                    self._digests.setdefault(name, []).append(digest)
                elif name in self._digests:
                    call = _Call(module, args, kwargs)
                    self._compared.append((name, digest, self._digests[name], call))

        return hook

    def _judge(self, step: int, name: str, again: torch.Tensor, originals: list[torch.Tensor], call: _Call) -> None:
        """Report the difference, unless the module is not repeatable."""
        reruns = [call.digest() for _ in range(RERUNS)]
        if call.draws_random_numbers or any(bool(one != reruns[0]) for one in reruns):
            self._unrepeatable.add(name)
            log.warning("%s is not bitwise repeatable, so its recomputation is no longer compared", name)
            return
        self.report_own(
            step,
            f"{name} forward",
            original=to_hex(originals[0]),
            digest=to_hex(reruns[0]),
            difference="the forward pass and its recomputation differ"
            if bool(reruns[0] == again)
            else "the recomputation differs from the forward pass and from a third run",
        )


class _Call:
    """A call of a module, to be repeated before the step ends. Its inputs stay in memory until then."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self.draws_random_numbers = False

    def digest(self) -> torch.Tensor:
        state = torch.get_rng_state()
        with torch.no_grad():
            result = combined_digest(tensors_in(self._module.forward(*self._args, **self._kwargs)))
        if not torch.equal(state, torch.get_rng_state()):
            self.draws_random_numbers = True
            torch.set_rng_state(state)
        return result


def eager_leaf_modules(objects: Any) -> Iterator[tuple[str, nn.Module]]:
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


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a module's output."""
    flat = torch.utils._pytree.tree_leaves(output)
    return [each.detach() for each in flat if isinstance(each, torch.Tensor) and each.is_floating_point()]
