"""Compute rows of a sampled matrix product again, in higher precision: forward, input gradient and weight gradient.

In each due step one `torch.nn.Linear` of the model is taken, and ROWS random rows of its three products. The product of
the same rows in float64 must agree within the rounding of the original. Two rules keep a wrong comparison from accusing
anybody. A difference counts only if the rows' product in the original precision agrees with float64, so the tolerance
fits. And it counts only if the same product agreed in an earlier audit: a penalty on the weights in the loss, for
example, adds to their gradient from the first step on.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditLink, AuditRole
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.digests.digest import tensor_digest, to_hex
from everstep_trainer.sdc.recompute import eager_leaf_modules

log = logging.getLogger(__name__)

ROWS = 64
ERROR_SIGMAS = 16.0
"""Tolerance in standard deviations of the rounding error of an inner product of K terms, which is about
eps * sqrt(K) * (root of the sum of squared terms); kernels may add in blocks, with smaller errors."""


class Matmul(Audit):
    """AuditLink.MATMUL on one rank."""

    link = AuditLink.MATMUL

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        self._linears = [
            (name, module)
            for name, module in eager_leaf_modules(setup.objects)
            if type(module) is nn.Linear and not isinstance(module, FSDPModule)
        ]
        self._audits = 0
        self._sampled: _SampledLinear | None = None
        self._agreed: set[str] = set()
        """Products that agreed before."""

    def begin_step(self, step: int, *, due: bool) -> None:
        if due and self._linears:
            name, module = self._linears[self._audits % len(self._linears)]
            self._audits += 1
            self._sampled = _SampledLinear(self, name, module, step)

    def before_update(self, step: int, *, due: bool) -> None:
        if self._sampled is not None:
            self._sampled.finish()
            self._sampled = None

    def close(self) -> None:
        if self._sampled is not None:
            self._sampled.remove()
            self._sampled = None

    def judge(self, step: int, unit: str, rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Report rows that are not those of the product of ``left`` and ``right``."""
        difference = compare_rows(rows, left, right)
        if difference is None:
            self._agreed.add(unit)
        elif unit in self._agreed:
            self.setup.report(
                Mismatch(
                    link=self.link,
                    step=step,
                    unit=unit,
                    owner=self.setup.rank,
                    role=AuditRole.OWNER,
                    original=to_hex(tensor_digest(rows)),
                    digest=to_hex(tensor_digest(product(left, right, rows.dtype))),
                    difference=difference,
                )
            )
        else:
            log.info("%s never agreed with its product, so it is not what it seems: this counts as no fault", unit)


class _SampledLinear:
    """The first call of one linear layer in one step, with its backward pass."""

    def __init__(self, audit: Matmul, name: str, module: nn.Linear, step: int) -> None:
        self._audit, self._name, self._module, self._step = audit, name, module, step
        self._generator = torch.Generator().manual_seed(step)
        self._is_taken = False
        self._calls = 0  # forward calls so far
        self._is_input_checked = self._is_weight_checked = False
        self._input: torch.Tensor | None = None
        self._output_gradient: torch.Tensor | None = None
        self._checks: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]

    def finish(self) -> None:
        """Judge the rows, and forget them."""
        self.remove()
        for unit, rows, left, right in self._checks:
            self._audit.judge(self._step, f"{self._name} {unit}", rows, left, right)
        self._checks.clear()
        self._input = self._output_gradient = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before_forward(self, module: nn.Linear, args: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return None
        self._calls += 1
        if self._is_taken:
            return None
        if not isinstance(args[0], torch.Tensor) or isinstance(args[0], DTensor) or isinstance(module.weight, DTensor):
            return None
        self._is_taken = True
        self._input = args[0].detach()
        if not args[0].requires_grad:
            return None
        return (_Tap.apply(args[0], self), *args[1:])  # type: ignore[no-untyped-call]

    def _after_forward(self, module: nn.Linear, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._input is None or self._calls > 1 or torch._C._current_graph_task_id() != -1:
            return
        with self._audit.cost(), torch.no_grad():
            self._input = self._input.reshape(-1, self._input.shape[-1]).to(output.dtype)  # as autocast does
            result = output.detach().reshape(-1, output.shape[-1])
            rows = self._some_rows(len(result))
            left, right = self._input[rows], module.weight.detach().to(output.dtype).t()
            if module.bias is not None:  # as one more column of ones
                bias = module.bias.detach().to(output.dtype)
                left = torch.cat([left, left.new_ones(len(left), 1)], dim=1)
                right = torch.cat([right, bias[None]])
            self._checks.append(("forward", result[rows].clone(), left, right.clone()))
        if output.requires_grad:
            output.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
            if module.weight.requires_grad:
                self._hooks.append(module.weight.register_hook(self._on_weight_gradient))  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        if self._output_gradient is None:
            self._output_gradient = gradient.detach().reshape(-1, gradient.shape[-1])

    def on_input_gradient(self, gradient: torch.Tensor) -> None:
        """Take rows of the input gradient. Runs in the backward pass, before the weight may be sharded again."""
        weight, outer = self._module.weight, self._output_gradient
        if outer is None or isinstance(weight, DTensor) or self._is_input_checked:
            return
        self._is_input_checked = True
        with self._audit.cost(), torch.no_grad():
            flat = gradient.detach().reshape(-1, gradient.shape[-1])
            rows = self._some_rows(len(flat))
            left, right = outer[rows], weight.detach().to(outer.dtype)
            self._checks.append(("input gradient", flat[rows].to(outer.dtype), left, right.clone()))

    def _on_weight_gradient(self, gradient: torch.Tensor) -> None:
        outer, inner = self._output_gradient, self._input
        if self._is_weight_checked or outer is None or inner is None or self._calls > 1:
            return  # the gradient of several calls at once, or of a later micro-batch
        self._is_weight_checked = True
        with self._audit.cost(), torch.no_grad():
            flat = gradient.detach()
            rows = self._some_rows(len(flat))
            self._checks.append(("weight gradient", flat[rows].to(outer.dtype), outer.t()[rows], inner.to(outer.dtype)))

    def _some_rows(self, count: int) -> torch.Tensor:
        if count <= ROWS:
            return torch.arange(count)
        return torch.randint(count, (ROWS,), generator=self._generator)


class _Tap(torch.autograd.Function):
    """The identity; shows the gradient that passes back through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sampled: _SampledLinear) -> torch.Tensor:
        ctx.sampled = sampled
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.sampled.on_input_gradient(gradients[0])
        return gradients[0], None


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the product, computed in float64 and rounded to ``dtype``."""
    return (left.double() @ right.double()).to(dtype)


def compare_rows(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> str | None:
    """Return how ``rows`` differ from ``left @ right`` beyond rounding; None if they agree or nothing can be said."""
    exact = left.double() @ right.double()
    if not bool(torch.isfinite(exact).all()):
        return None
    tolerance = _tolerance(rows, left, right, exact)
    wrong = ~((rows.double() - exact).abs() <= tolerance)
    if not bool(wrong.any()):
        return None
    again = left @ right
    if bool(((again.double() - exact).abs() > tolerance).any()):
        return None  # these operands need a larger tolerance
    row, column = wrong.nonzero()[0].tolist()
    got, expected = float(rows[row, column]), float(exact[row, column])
    return f"{int(wrong.sum())} of {rows.numel()} elements differ, the first: got {got:.9g}, expected {expected:.9g}"


def _tolerance(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each element that rounding explains."""
    accumulated = torch.finfo(torch.float32).eps if rows.dtype != torch.float64 else torch.finfo(torch.float64).eps
    if rows.is_cuda and torch.backends.cuda.matmul.allow_tf32 and rows.dtype is torch.float32:
        accumulated = 2.0**-10  # TF32 has 10 bits of mantissa
    terms = (left.double().square() @ right.double().square()).sqrt()
    summed = ERROR_SIGMAS * accumulated * max(1.0, math.sqrt(left.shape[1]) / 4) * terms
    tolerance: torch.Tensor = summed + torch.finfo(rows.dtype).eps * exact.abs()
    return tolerance
