"""Check the matrix products of linear layers: forward, input gradient and weight gradient.

In a due step all products of all eager `torch.nn.Linear` layers are screened by checksums (`checksums`), in each call.
Where the sums look wrong, elements are compared with float64. Two rules keep a wrong comparison from accusing a rank.
A difference counts only if the elements' product in the original precision agrees with float64, so the tolerance fits.
And it counts only if the same product agreed in an earlier audit, even where its sums fit worst. In the first audits of
a generation it also counts if the product agrees on most other ranks: the rank may have been wrong from the beginning.

Nothing is kept that autograd does not keep. The weight's gradient needs the layer's input. A call refers to it as long
as its graph does. Under activation checkpointing the input is taken from the recomputation.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditKind
from everstep.wire.v1.local import MAX_OPERAND_BYTES, WrongProduct
from everstep_trainer.digests.digest import tensor_digest, to_hex
from everstep_trainer.sdc.audit import Audit, AuditSetup, current_backward_pass, is_in_backward
from everstep_trainer.sdc.checksums import (
    Patch,
    Product,
    compare_elements,
    multiplies_in_tf32,
    product_of,
    residuals,
    screen,
    worst_patch,
)
from everstep_trainer.state.python_value_codec import as_bytes, dtype_name
from everstep_trainer.state.tracked_objects import as_list

log = logging.getLogger(__name__)

MAX_REPORTS = 3
"""Most products that are reported for one step."""
SMALL = 1 / 12
"""Part of the allowed residual below which all residuals of a product must lie before what is allowed is found anew."""
PRODUCTS = ("forward", "input gradient", "weight gradient")
"""Those of a layer."""
VOTES = 3
"""First audits of a generation in which the ranks compare which products never agreed with float64."""
LINEAR_FORWARD = nn.Linear.forward
"""The forward pass that PyTorch came with."""
GRAPH_DEPTH = 8
"""Most nodes of the autograd graph from a layer's output to its weight."""


class _Suspect(msgspec.Struct, frozen=True):
    """Where a product's sums fit worst. ``is_suspicious``: a tensor, so that nothing waits for the GPU."""

    unit: str
    is_suspicious: torch.Tensor
    patch: Patch


class Matmul(Audit):
    """AuditKind.MATMUL on one rank."""

    kind = AuditKind.MATMUL

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        self._linears = [
            _Linear(self, name, module)
            for name, module in _eager_leaf_modules(setup.objects)
            if type(module) is nn.Linear and not isinstance(module, FSDPModule)
        ]
        self._agreed: set[str] = set()
        """Products that agreed before."""
        self._allowed: dict[str, torch.Tensor] = {}
        """The last allowed residual of each column, by product."""
        self._suspects: list[_Suspect] = []
        self._is_watching = False
        self._doubted: set[str] = set()
        self._votes = 0
        """Audits so far in which the ranks compared which products never agreed."""

    def checked_modules(self) -> Iterator[nn.Module]:
        yield from (linear.module for linear in self._linears if not _is_forward_replaced(linear.module))

    def begin_step(self, step: int, *, due: bool) -> None:
        self.close()
        if due:
            self._is_watching = True
            for linear in self._linears:
                linear.watch()

    def before_update(self, step: int, *, due: bool) -> None:
        suspects = self._suspects
        self.close()
        if not due:
            return
        reports = 0
        doubts: dict[str, tuple[Patch, str]] = {}  # products that differ and never agreed here
        flags = (
            torch.stack([suspect.is_suspicious.to(self.setup.device) for suspect in suspects]).tolist()
            if suspects
            else []
        )
        for suspect, is_suspicious in zip(suspects, flags, strict=True):
            if reports < MAX_REPORTS and (is_suspicious or suspect.unit not in self._agreed):
                difference = self._compare(suspect.unit, suspect.patch)
                if difference and suspect.unit in self._agreed:
                    self._report(step, suspect.unit, suspect.patch, difference)
                    reports += 1
                elif difference:
                    doubts.setdefault(suspect.unit, (suspect.patch, difference))
        if self._votes < VOTES and self.setup.world_size > 1:
            self._votes += 1
            for unit in self._doubted_here_alone(doubts)[: MAX_REPORTS - reports]:
                self._report(step, unit, *doubts.pop(unit))
        for unit in doubts.keys() - self._doubted:
            log.info("%s never agreed with its product, so it is not what it seems: this counts as no fault", unit)
        self._doubted |= doubts.keys()

    def close(self) -> None:
        if self._is_watching:
            self._is_watching = False
            for linear in self._linears:
                linear.leave()
            self._suspects = []

    def check(self, unit: str, product: Product) -> None:
        """Screen a product. What looks wrong is judged before the update."""
        if product.result.numel() and product.left.numel():
            with _no_autocast(product.result.device.type):
                self._screen(unit, product)

    def _screen(self, unit: str, product: Product) -> None:
        residual = residuals(product)
        allowed = self._allowed.get(unit)
        is_known = not residual.is_cuda and unit in self._agreed
        if is_known and allowed is not None and len(allowed) == residual.shape[1]:
            largest = float((residual / allowed).abs_().max())
            if SMALL <= largest <= 1.0:
                return
        screening = screen(product, residual)
        if not residual.is_cuda:
            self._allowed[unit] = screening.allowed
            if unit in self._agreed and not bool(screening.is_suspicious):
                return
        self._suspects.append(_Suspect(unit, screening.is_suspicious, worst_patch(product, screening.place)))

    def _compare(self, unit: str, patch: Patch) -> str:
        """Return how elements differ from those of their product; empty if they agree."""
        with _no_autocast(patch.rows.device.type):
            difference = compare_elements(patch.rows, patch.left, patch.right)
        if difference is None and bool(torch.isfinite(patch.rows).all()):
            self._agreed.add(unit)
        return difference or ""

    def _doubted_here_alone(self, doubts: Collection[str]) -> list[str]:
        """Return the products in doubt that agree on most other ranks. A collective.

        A layer whose forward pass is no plain product differs on all ranks. On few ranks alone, the product is plain
        and the rank is wrong, from its first step on.
        """
        units = [f"{linear.name} {product}" for linear in self._linears for product in PRODUCTS]
        if not units:
            return []
        states = [[unit in doubts, unit in self._agreed and unit not in doubts] for unit in units]
        counts = torch.tensor(states, dtype=torch.int64, device=self.setup.device)
        with self.waiting():
            dist.all_reduce(counts)
        alone = [2 * doubting < self.setup.world_size and doubting < agreed for doubting, agreed in counts.tolist()]
        return [unit for unit, is_alone in zip(units, alone, strict=True) if is_alone and unit in doubts]

    def _report(self, step: int, unit: str, patch: Patch, difference: str) -> None:
        """Report elements that are not those of their product."""
        product = capture_wrong_product(f"{unit} of step {step}", patch)
        if product is not None:
            self.setup.keep_wrong_product(product)
        self.report_own(
            step,
            unit,
            original=to_hex(tensor_digest(patch.rows)),
            digest=to_hex(tensor_digest(product_of(patch.left, patch.right, patch.rows.dtype))),
            difference=difference,
        )


def capture_wrong_product(work: str, patch: Patch) -> WrongProduct | None:
    """Return the operands of wrong elements; None if they are too large to keep.

    Args:
        work: The product, in words.
        patch: The elements, the worst one first.
    """
    inner, columns = patch.right.shape
    rows = min(len(patch.left), MAX_OPERAND_BYTES // (inner * patch.left.element_size()))
    if not rows or inner * columns * patch.right.element_size() > MAX_OPERAND_BYTES:
        return None
    dtype: Any = dtype_name(patch.left.dtype)
    return WrongProduct(
        work=work,
        dtype=dtype,
        rows=rows,
        inner=inner,
        columns=columns,
        left=as_bytes(patch.left[:rows]),
        right=as_bytes(patch.right),
        allows_tf32=patch.left.is_cuda and multiplies_in_tf32(),
    )


class _Linear:
    """One linear layer, and its calls in a due step."""

    def __init__(self, audit: Matmul, name: str, module: nn.Linear) -> None:
        self.audit, self.name, self.module = audit, name, module
        self._hooks: list[RemovableHandle] = []
        self._call: _LayerCall | None = None  # between the hooks around a forward pass
        self._recomputed: list[torch.Tensor] = []  # inputs of recomputed calls whose backward pass is to come

    @property
    def is_watched(self) -> bool:
        return bool(self._hooks)

    def watch(self) -> None:
        self._hooks = [
            self.module.register_forward_pre_hook(self._before_forward),
            self.module.register_forward_hook(self._after_forward, prepend=True),  # others may change the output
        ]

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._call, self._recomputed = [], None, []

    def take_recomputed(self) -> torch.Tensor | None:
        """Return the input of the only recomputed call; None if there are several, as they may come in any order."""
        found, self._recomputed = self._recomputed, []
        return found[0] if len(found) == 1 else None

    def _before_forward(self, module: nn.Linear, args: tuple[Any, ...]) -> Any:
        self._call = None
        weight = module.weight
        if not torch.is_grad_enabled() or not args or not _is_plain(args[0]) or not _is_plain(weight):
            return None
        if _is_forward_replaced(module):
            return None
        with self.audit.cost():
            x, are_saved_elsewhere = args[0], _are_saved_elsewhere()
            if are_saved_elsewhere and is_in_backward():
                if weight.requires_grad:
                    self._recomputed.append(x.detach())
                return None
            self._call = call = _LayerCall(self)
            dtype, tapped = _dtype_under_autocast(x), x
            # Autocast casts a leaf once for several layers, so a cast of its own would add up gradients otherwise.
            if dtype is x.dtype or not (x.is_leaf and x.requires_grad):
                tapped = _Tap.apply(x, dtype, call)  # type: ignore[no-untyped-call]
                call.is_tapped = tapped.requires_grad
            if weight.requires_grad and not are_saved_elsewhere:
                call.input = tapped.detach()
            return (tapped, *args[1:])

    def _after_forward(self, module: nn.Linear, args: tuple[Any, ...], output: Any) -> None:
        call, self._call = self._call, None
        is_recomputed = call is None and is_in_backward() and torch.is_grad_enabled()
        if (call is None and not is_recomputed) or not args or not _is_plain(args[0]) or not _is_plain(output):
            return
        if _is_forward_replaced(module):
            return
        with self.audit.cost(), torch.no_grad(), _no_dispatch_modes():
            bias = None if module.bias is None else module.bias.detach()
            left, result = _matrix(args[0]), _matrix(output)
            self.audit.check(f"{self.name} forward", Product(result, left, module.weight.detach().t(), bias))
            if call is not None and output.requires_grad:
                origin = _origin(output)
                number, node = origin.output_nr, origin.grad_fn
                if node is not None:
                    node.register_prehook(lambda gradients: call.on_output_gradient(gradients[number]))
                    self._watch_weight(call, args[0].grad_fn, node)

    def _watch_weight(self, call: _LayerCall, tap: Node | None, output: Node) -> None:
        """Have a call see its weight gradient, only what this call adds to it.

        Args:
            call: The call.
            tap: The node before its input.
            output: The node of its output.
        """
        if not self.module.weight.requires_grad:
            return
        found = _edges_to(self.module.weight, output, tap)
        if len(found) != 1:
            call.input = None
            return
        node, index = found[0]
        call.awaits_weight = True
        own = weakref.ref(call)

        def hook(gradients: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]) -> None:
            one, gradient = own(), gradients[index]
            if one is not None and gradient is not None:
                one.on_weight_gradient(gradient)

        node.register_hook(hook)


class _LayerCall:
    """One call of a layer. ``is_tapped``: the gradient of its input will be seen."""

    def __init__(self, linear: _Linear) -> None:
        self._linear = linear
        self.is_tapped = False
        self.input: torch.Tensor | None = None
        self.awaits_weight = self.is_weight_judged = self._is_input_judged = False
        self._output_gradient: torch.Tensor | None = None
        self._pass: int | None = None

    def on_output_gradient(self, gradient: torch.Tensor | None) -> None:
        """Begin to watch the first backward pass. Later ones may bring other gradients, or only a part of them."""
        if gradient is not None and self._linear.is_watched and self._pass is None:
            self._pass, self._output_gradient = current_backward_pass(), _matrix(gradient)
        else:
            self._output_gradient = None

    def on_input_gradient(self, gradient: torch.Tensor) -> None:
        """Check the input's gradient. Runs in the backward pass, before the weight may be sharded again."""
        outer, weight = self._gradient_of_pass(), self._linear.module.weight
        if outer is not None and not self._is_input_judged and self._linear.is_watched and _is_plain(weight):
            self._is_input_judged = True
            with self._linear.audit.cost(), torch.no_grad():
                result = _matrix(gradient).to(outer.dtype)
                self._linear.audit.check(f"{self._linear.name} input gradient", Product(result, outer, weight.detach()))
        self._release()

    def on_weight_gradient(self, gradient: torch.Tensor) -> None:
        """Check what this call adds to the weight's gradient."""
        outer = self._gradient_of_pass()
        if outer is not None and self.awaits_weight and not self.is_weight_judged and self._linear.is_watched:
            self.is_weight_judged = True
            with self._linear.audit.cost(), torch.no_grad():
                inner = self.input if self.input is not None else self._linear.take_recomputed()
                if inner is not None and _is_plain(gradient):
                    self._check_weight_gradient(gradient.detach().to(outer.dtype), outer, _matrix(inner))
        self._release()

    def _check_weight_gradient(self, gradient: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> None:
        if len(gradient) <= gradient.shape[1]:
            product = Product(gradient, outer.t(), inner)
        else:  # the shorter side is added up
            product = Product(gradient.t(), inner.t(), outer)
        self._linear.audit.check(f"{self._linear.name} weight gradient", product)

    def _gradient_of_pass(self) -> torch.Tensor | None:
        """Return the output's gradient; None if another backward pass brought it."""
        if self._pass != current_backward_pass():
            self._output_gradient = None
        return self._output_gradient

    def _release(self) -> None:
        """Forget tensors that no check needs any more."""
        is_done = self._is_input_judged or not self.is_tapped
        if not self._linear.is_watched or (is_done and (self.is_weight_judged or not self.awaits_weight)):
            self.input = self._output_gradient = None


class _Tap(torch.autograd.Function):
    """Casts as autocast does, else the identity; shows the gradient that passes back through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, call: _LayerCall) -> torch.Tensor:
        ctx.call, ctx.dtype = call, tensor.dtype
        if tensor.dtype is not dtype:
            return tensor.to(dtype)
        with _no_dispatch_modes():
            return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call.on_input_gradient(gradients[0])
        return gradients[0].to(ctx.dtype), None, None


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's rows, of all its dimensions but the last."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _is_forward_replaced(module: nn.Linear) -> bool:
    """Whether the program has replaced the layer's forward pass, or that of all layers, for instance to quantise."""
    return "forward" in vars(module) or type(module).forward is not LINEAR_FORWARD


def _is_plain(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, nn.Parameter)  # no DTensor, for instance
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.ndim > 0
        and tensor.is_floating_point()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _are_saved_elsewhere() -> bool:
    """Return whether hooks decide what autograd saves, as those of activation checkpointing and offloading do."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _no_dispatch_modes() -> AbstractContextManager[Any]:
    """Hide operations from modes that count or keep them, as those of selective activation checkpointing do."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _dtype_under_autocast(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a product multiplies a tensor."""
    device = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def _origin(output: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose node stays in the graph if ``output`` is changed in place, as by a ReLU."""
    base = output._base
    is_same = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if base is not None and is_same and base.grad_fn is not None else output


def _edges_to(leaf: torch.Tensor, output: Node, end: Node | None) -> list[tuple[Node, int]]:
    """Return the nodes that pass a gradient of ``output`` to ``leaf``, without those beyond ``end``.

    The node before a cast stands for it: autocast casts a weight once, so the gradients of several uses meet there.
    """
    found: list[tuple[Node, int]] = []
    nodes: list[tuple[Node, tuple[Node, int] | None]] = [(output, None)]
    for _ in range(GRAPH_DEPTH):
        following: list[tuple[Node, tuple[Node, int] | None]] = []
        for node, edge in nodes:
            for index, (child, _number) in enumerate(node.next_functions):
                if child is None or child is end:
                    continue
                if not hasattr(child, "variable"):
                    following.append((child, (node, index)))
                elif child.variable is leaf:
                    is_cast = edge is not None and node.name().startswith("ToCopyBackward")
                    found.append(edge if edge is not None and is_cast else (node, index))
        nodes = following
    return found


def _eager_leaf_modules(objects: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the tracked modules without children that are not compiled, whose hooks would compile them anew."""
    for key, tracked in objects.items():
        for module in as_list(tracked):
            if isinstance(module, nn.Module):
                yield from _eager_leaves(key, module)


def _eager_leaves(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
        return
    children = list(module.named_children())
    if not children and not isinstance(module, nn.modules.dropout._DropoutNd):
        yield name, module
    for key, child in children:
        yield from _eager_leaves(f"{name}.{key}", child)
