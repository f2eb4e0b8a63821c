"""Let a fault act at its place in one rank's training: in products, gradients, collectives, memory or the detector.

Without an active fault, the same kernels run on the same values, so the numbers stay as they are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules import rnn
from torch.optim import adam

from bench.sdc.injection import Fault, Site
from bench.sdc.networks import Network
from everstep_trainer.parallel.lane import GlooCommunicator
from everstep_trainer.sdc.audit import is_in_backward

_CHAIN_PACKAGES = ("everstep_trainer.sdc.", "everstep_trainer.digests.")


class FaultySite:
    """The place where a fault acts. ``install`` prepares it for a run of steps; the other methods are called in each
    step where their names say."""

    targets: tuple[tuple[Any, str], ...] = ()
    """Functions that ``call`` takes the place of, by module and name."""

    def __init__(self, fault: Fault, model: nn.Module, inner: Network, optimizer: torch.optim.Optimizer) -> None:
        self.fault, self.model, self.inner, self.optimizer = fault, model, inner, optimizer
        self.is_in_passes = False

    @contextmanager
    def install(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name in self.targets:
                stack.enter_context(patched(module, name, self._wrap))
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: self.call(original, *args, **options)

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Called in place of each patched function."""
        raise NotImplementedError

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        yield

    def before_backward(self) -> None:
        """Called between the passes."""

    def after_backward(self) -> None:
        """Called before the audits and the update."""

    def at_rest(self) -> None:
        """Called between two steps."""

    def parameters(self) -> list[torch.Tensor]:
        """Return this rank's parts of all parameters."""
        return [local(parameter) for parameter in self.inner.parameters()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class _Tap(torch.autograd.Function):
    """The identity, with a fault in its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.fault.corrupted(gradient), None


class _Products(FaultySite):
    """Products of linear layers, convolutions and recurrent layers.

    They are wrong in audits, too: the same hardware does them. A recurrent layer is one call, whose outputs are hit.
    """

    site = Site.GEMM_FORWARD
    targets = ((functional, "linear"), (functional, "conv2d"))

    @contextmanager
    def install(self) -> Iterator[None]:
        with (
            super().install(),
            patched(rnn, "_VF", lambda original: SimpleNamespace(lstm=self._wrap_lstm(original.lstm))),
        ):
            yield

    def _wrap_lstm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def lstm(x: torch.Tensor, state: Any, weights: list[torch.Tensor], *more: Any) -> Any:
            results = original(self._input(x), state, [self._weight(weight) for weight in weights], *more)
            if self.site is Site.GEMM_FORWARD:
                self.fault.corrupt(results[0])
            return results

        return lstm

    def _input(self, x: torch.Tensor) -> Any:
        is_hit = self.site is Site.GEMM_INPUT_GRADIENT and x.requires_grad
        return _Tap.apply(x, self.fault) if is_hit else x

    def _weight(self, weight: torch.Tensor) -> Any:
        is_hit = self.site is Site.GEMM_WEIGHT_GRADIENT and weight.requires_grad
        return _Tap.apply(weight, self.fault) if is_hit else weight

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        x, weight, *more = args
        if self.site is Site.GEMM_FORWARD:
            result = original(*args, **options)
            self.fault.corrupt(result)
            return result
        if torch.is_autocast_enabled("cpu"):
            x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        return original(self._input(x), self._weight(weight), *more, **options)


class _InputGradients(_Products):
    site = Site.GEMM_INPUT_GRADIENT


class _WeightGradients(_Products):
    site = Site.GEMM_WEIGHT_GRADIENT


class _Attention(FaultySite):
    targets = ((functional, "scaled_dot_product_attention"),)

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        self.fault.corrupt(result)
        return result


class _LocalGradients(FaultySite):
    """Gradients as the backward pass leaves them, before anything reads them. Audits trust hooks, so it is none."""

    targets = ((GradBucket, "buffer"), (_fsdp_param_group, "foreach_reduce"))

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if isinstance(args[0], GradBucket):
            gradients = original(*args)
            if self.is_in_passes:
                self.fault.corrupt(gradients)
            return gradients
        for gradient in args[1]:
            self.fault.corrupt(gradient)
        return original(*args, **options)


class _BeforeCollective(FaultySite):
    """The buffer that a rank hands to the collective."""

    targets = ((GlooCommunicator, "all_to_all"), (dist, "reduce_scatter_single"))

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.is_in_passes:
            self.fault.corrupt(options["input"] if "input" in options else args[2])
        return original(*args, **options)


class _AfterCollective(FaultySite):
    """The gradients that a rank has received."""

    def after_backward(self) -> None:
        for parameter in self.inner.parameters():
            if parameter.grad is not None:
                self.fault.corrupt(local(parameter.grad))


class _Update(FaultySite):
    """The parameters that the optimizer computes, also when an audit repeats its work."""

    targets = ((adam, "adam"),)

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        original(*args, **options)
        for parameter in args[0]:
            self.fault.corrupt(local(parameter))


class _Parameters(FaultySite):
    def at_rest(self) -> None:
        for parameter in self.parameters():
            self.fault.corrupt(parameter)


class _Moments(FaultySite):
    def at_rest(self) -> None:
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                self.fault.corrupt(local(state[name]))


class _Activations(FaultySite):
    """What is held from the forward pass to the backward pass: saved tensors, or inputs of blocks computed again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: list[torch.Tensor] = []

    @contextmanager
    def install(self) -> Iterator[None]:
        hooks = [block.register_forward_hook(self._hold) for block in self.inner.blocks] if self.inner.recompute else []
        yield
        for hook in hooks:
            hook.remove()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        if self.inner.recompute:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def before_backward(self) -> None:
        for tensor in self._held:
            self.fault.corrupt(tensor)
        self._held.clear()

    def _hold(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.is_in_passes and not is_in_backward():
            self._held.append(output.detach())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        is_activation = tensor.is_floating_point() and not tensor.is_leaf
        return self.fault.corrupted(tensor.detach()) if is_activation else tensor


class _Lie(FaultySite):
    """Functions of the chain are wrong, in all of its modules."""

    names: tuple[str, ...] = ()

    @contextmanager
    def install(self) -> Iterator[None]:
        chain = [module for name, module in sys.modules.items() if name.startswith(_CHAIN_PACKAGES)]
        with ExitStack() as stack:
            for module, name in itertools.product(chain, self.names):
                if callable(getattr(module, name, None)):
                    stack.enter_context(patched(module, name, self._wrap))
            yield


class _LyingDigest(_Lie):
    """Digests of the chain are wrong where they are computed."""

    names = ("tensor_digest", "combined_digest")

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        return result + 1 if self.fault.happens() else result


class _LyingReplay(_Lie):
    """Calls that an audit does again have wrong results, for a rank's own work and for that of others."""

    names = ("replay",)

    def call(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        record = original(*args, **options)
        if self.fault.happens():
            record.digests = [None if digest is None else digest + 1 for digest in record.digests]
        return record


GRAPH_SITES = (Site.GEMM_INPUT_GRADIENT, Site.GEMM_WEIGHT_GRADIENT)
"""Sites that add nodes to the autograd graph, which all ranks get alike: audits compare only equal graphs."""
SITES: dict[Site, type[FaultySite]] = {
    Site.GEMM_FORWARD: _Products,
    Site.GEMM_INPUT_GRADIENT: _InputGradients,
    Site.GEMM_WEIGHT_GRADIENT: _WeightGradients,
    Site.ATTENTION: _Attention,
    Site.LOCAL_GRADIENT: _LocalGradients,
    Site.BEFORE_COLLECTIVE: _BeforeCollective,
    Site.AFTER_COLLECTIVE: _AfterCollective,
    Site.UPDATE: _Update,
    Site.PARAMETERS: _Parameters,
    Site.MOMENTS: _Moments,
    Site.ACTIVATIONS: _Activations,
    Site.LYING_DIGEST: _LyingDigest,
    Site.LYING_REPLAY: _LyingReplay,
}


@contextmanager
def patched(module: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``module.name`` by ``wrap(module.name)`` for a while."""
    original = getattr(module, name)
    setattr(module, name, wrap(original))
    try:
        yield
    finally:
        setattr(module, name, original)
