"""Capture one call of a unit in a step of training: what went into its passes, and digests of what came out.

The digests are taken from the tensors that training goes on with. Hooks on the nodes of the autograd graph see what
this call alone contributes to gradients, even if other modules use the same input or parameter. Nothing about the
computation changes, so the results of training keep their bits.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from everstep_trainer.digests.digest import combined_digest, tensor_digest
from everstep_trainer.sdc.audit import is_in_backward
from everstep_trainer.sdc.replay.units import Unit

log = logging.getLogger(__name__)

MAX_TENSORS = 100
"""Most tensors that go into or come out of a unit."""

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


class UnsupportedUnit(Exception):
    """A unit's call cannot be done again elsewhere; the message says why."""


# ---- copies of tensors


class TensorLayout(msgspec.Struct, frozen=True):
    """How a tensor lies in the range of memory that it spans. ``is_host``: it is not on the rank's device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_host: bool


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tensor with its strides, on which the choice of kernels may depend. ``flat``: the range it spans."""

    flat: torch.Tensor
    layout: TensorLayout

    def tensor(self, *, copy: bool = True) -> torch.Tensor:
        """Return the tensor; with ``copy``, one that may be changed."""
        flat = self.flat.clone() if copy else self.flat
        return flat.as_strided(self.layout.size, self.layout.stride)


def take_snapshot(tensor: torch.Tensor) -> Snapshot:
    """Copy a tensor; raise UnsupportedUnit if it is not an ordinary one."""
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedUnit(f"its inputs or outputs contain a {type(tensor).__name__} of layout {tensor.layout}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedUnit(f"its inputs or outputs contain a {type(tensor).__name__}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    size, stride = tuple(plain.shape), plain.stride()
    span = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    with torch.no_grad():
        flat = plain.as_strided((span,), (1,)).clone()
    name = str(plain.dtype).removeprefix("torch.")
    return Snapshot(flat, TensorLayout(size, stride, name, tensor.requires_grad, plain.device.type == "cpu"))


# ---- the state of the process that a pass depends on


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of a thread for each kind of device."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    is_cached: bool

    @classmethod
    def read(cls, device: torch.device) -> AutocastState:
        kinds = dict.fromkeys(("cpu", device.type))
        settings = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(tuple(settings), torch.is_autocast_cache_enabled())

    @contextmanager
    def applied(self) -> Any:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self.is_cached))
            yield


def rng_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of torch's generators: the host's and that of ``device``."""
    host = torch.get_rng_state()
    return (host,) if device.type != "cuda" else (host, torch.cuda.get_rng_state(device))


def set_rng_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Set what ``rng_states`` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _other_rng_states() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    _, words, position, *_ = numpy.random.get_state()
    return random.getstate(), words.tobytes(), position


# ---- digests of a pass


class ItemKind(Enum):
    """Kinds of results of a unit's passes."""

    OUTPUT = "output"
    INPUT_GRADIENT = "input gradient"
    PARAMETER_GRADIENT = "parameter gradient"


@dataclass(frozen=True)
class Item:
    """One result of a unit's passes."""

    kind: ItemKind
    name: str


class PassRecord:
    """Digests of the results of one forward and backward pass of a unit.

    Gradients are recorded as the parts that single operations of the unit contribute to them, in the order of the
    graph. Training adds these parts up.

    Args:
        module: The unit's module, with whole parameters.
        on_gradient: Called with the number of an output and its gradient once the backward pass reaches the unit.
        cost: Entered around work in hooks.
        outputs_only: Why gradients are not to be recorded.
        copies: Keep copies of the results, which nothing changes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        on_gradient: Callable[[int, torch.Tensor], None] | None = None,
        cost: Callable[[], AbstractContextManager[None]] = nullcontext,
        outputs_only: str = "",
        copies: bool = False,
    ) -> None:
        self._copies = copies
        self._module, self._on_gradient, self._cost = module, on_gradient, cost
        self.items: list[Item] = []
        self.digests: list[torch.Tensor | None] = []
        self.values: list[tuple[torch.Tensor, int] | None] = []
        """The results and their version counters, which tell whether they were changed in place since."""
        self.outputs: list[torch.Tensor] = []
        """Outputs through which gradients enter."""
        self.outputs_only = outputs_only
        """Why gradients are not recorded."""
        self.has_mixed_gradients = False
        """An output's gradient came from another output and from outside: the latter alone is not known."""
        self._input_edges: dict[tuple[Node, int], int] = {}
        self._first_sequence_nr = 0
        self._handles: list[RemovableHandle] = []
        self._entered: set[int] = set()
        # What other outputs contribute to an output's gradient, by the number of that output.
        self._from_outputs: dict[int, list[torch.Tensor]] = {}

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Begin right before the forward pass on ``inputs``."""
        for number, tensor in enumerate(inputs):
            if tensor.requires_grad:
                self._input_edges[_edge(tensor)] = number
        self._first_sequence_nr = torch._C._autograd._get_sequence_nr()

    def finish_forward(self, outputs: Any) -> None:
        """Record the outputs right after the forward pass, and watch the backward pass."""
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise UnsupportedUnit(f"no tensors are found in what it returns ({type(outputs).__qualname__})")
        if len(tensors) > MAX_TENSORS:
            raise UnsupportedUnit(f"it returns {len(tensors)} tensors")
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
                raise UnsupportedUnit(f"it returns a {type(tensor).__name__} of layout {tensor.layout}")
            self._add(Item(ItemKind.OUTPUT, f"output {number}"), tensor)
        edges: dict[tuple[Node, int], torch.Tensor] = {}
        for tensor in tensors:
            if tensor.grad_fn is not None and self._is_own(tensor.grad_fn):
                edges.setdefault(_edge(tensor), tensor)
        if edges and not self.outputs_only:
            self._watch(edges)
        self._input_edges.clear()

    def parts(self) -> list[torch.Tensor]:
        """Return one digest for each kind of item; zeros for gradients that were not recorded."""
        made = []
        for kind in ItemKind:
            digests = [d for item, d in zip(self.items, self.digests, strict=True) if item.kind is kind]
            found = next((digest for digest in digests if digest is not None), None)
            if found is None:
                made.append(torch.zeros((), dtype=torch.int64))
            else:
                nothing = torch.zeros_like(found)
                made.append(combined_digest([torch.stack([nothing if d is None else d for d in digests])]))
        return made

    def structure(self) -> str:
        """Return the items in words: equal for equal passes."""
        return repr([(item.kind.value, item.name) for item in self.items])

    def with_digests(self, digests: list[torch.Tensor | None]) -> PassRecord:
        """Return a record of the same items with other digests and no values."""
        other = PassRecord(self._module)
        other.items, other.digests, other.values = list(self.items), digests, [None] * len(self.items)
        other.outputs_only = self.outputs_only
        return other

    def release(self) -> None:
        """Remove all hooks, and drop the outputs and the graph behind them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._from_outputs.clear()
        self.outputs.clear()

    def output_values(self) -> list[torch.Tensor]:
        """Return the outputs; raise UnsupportedUnit if they were changed in place since."""
        return [self.value(number) for number, item in enumerate(self.items) if item.kind is ItemKind.OUTPUT]

    def value(self, number: int) -> torch.Tensor:
        """Return the result of an item; raise UnsupportedUnit if it was changed in place since, or is not held."""
        held = self.values[number]
        if held is None or (not held[0].is_inference() and held[0]._version != held[1]):
            raise UnsupportedUnit(f"{self.items[number].name} was changed in place")
        return held[0]

    def _add(self, item: Item, value: torch.Tensor | None) -> int:
        self.items.append(item)
        self.digests.append(None)
        self.values.append(None)
        if value is not None:
            self._record(len(self.items) - 1, value)
        return len(self.items) - 1

    def _record(self, number: int, value: torch.Tensor) -> None:
        if self.digests[number] is None:
            value = value.detach().clone() if self._copies else value.detach()
            if value.layout is torch.sparse_coo:  # the gradient of a sparse embedding
                self.digests[number] = combined_digest([value._indices(), value._values()])
            if value.layout is not torch.strided:
                return
            self.digests[number] = tensor_digest(value)
            self.values[number] = value, 0 if value.is_inference() else value._version

    def _is_own(self, node: Node) -> bool:
        """Return whether this pass has made the node; those that accumulate gradients have the largest number."""
        return self._first_sequence_nr <= node._sequence_nr() < 1 << 63

    def _watch(self, edges: dict[tuple[Node, int], torch.Tensor]) -> None:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        slots: dict[Node, list[tuple[int, int]]] = {}  # places among a node's results, and the items there
        items: list[tuple[Node, int, Item]] = []
        numbers = {edge: number for number, edge in enumerate(edges)}
        pending, seen = [node for node, _ in reversed(edges)], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == "CheckpointFunctionBackward":
                self.outputs_only = "it recomputes activations with use_reentrant=True: use False"
                return
            for slot, (target, place) in enumerate(node.next_functions):
                if target is None:
                    continue
                if (output := numbers.get((target, place))) is not None:  # such as logits beside their loss
                    if self._on_gradient is not None:
                        self._handles.append(node.register_hook(self._inner_hook(slot, output)))
                    continue
                if (number := self._input_edges.get((target, place))) is not None:
                    items.append((node, slot, Item(ItemKind.INPUT_GRADIENT, f"gradient of input {number}")))
                elif (parameter := _parameter_behind(target)) is not None:
                    if (name := names.get(id(parameter))) is not None:
                        items.append((node, slot, Item(ItemKind.PARAMETER_GRADIENT, f"gradient of {name}")))
                elif self._is_own(target):
                    pending.append(target)
        for node, slot, item in items:
            slots.setdefault(node, []).append((slot, self._add(item, None)))
        for node, places in slots.items():
            self._handles.append(node.register_hook(self._contribution_hook(places)))
        for number, ((node, place), tensor) in enumerate(edges.items()):
            self.outputs.append(tensor)
            if self._on_gradient is not None:
                self._handles.append(node.register_prehook(self._entry_hook(number, place)))

    def _contribution_hook(self, places: list[tuple[int, int]]) -> Callable[..., None]:
        def record(results: Sequence[torch.Tensor | None], _: Any) -> None:
            with self._cost():
                for slot, number in places:
                    if (value := results[slot]) is not None:
                        self._record(number, value)

        return record

    def _inner_hook(self, slot: int, output: int) -> Callable[..., None]:
        def hold(results: Sequence[torch.Tensor | None], _: Any) -> None:
            if (value := results[slot]) is None:
                return
            self.has_mixed_gradients |= output in self._entered
            self._from_outputs.setdefault(output, []).append(value)

        return hold

    def _entry_hook(self, number: int, place: int) -> Callable[..., None]:
        def enter(gradients: Sequence[torch.Tensor | None]) -> None:
            gradient = gradients[place]
            if gradient is None or number in self._entered or self._on_gradient is None:
                return
            self._entered.add(number)
            with self._cost():
                from_outputs = self._from_outputs.pop(number, [])
                if not from_outputs:
                    self._on_gradient(number, gradient)
                else:
                    self.has_mixed_gradients |= not _is_sum(gradient, from_outputs)

        return enter


def _is_sum(gradient: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether a gradient has the bits of the sum of its parts, in the order in which they came."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    if total is gradient:
        return True
    is_alike = total.dtype == gradient.dtype and total.shape == gradient.shape
    return is_alike and bool(tensor_digest(total) == tensor_digest(gradient))


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _parameter_behind(node: Node) -> torch.Tensor | None:
    """Return the parameter whose gradient the node passes on, itself or after a cast that autocast may have cached."""
    variable: torch.Tensor | None = getattr(node, "variable", None)
    if variable is None and node.name().startswith("ToCopyBackward") and (behind := node.next_functions[0][0]):
        variable = getattr(behind, "variable", None)
    return variable


# ---- the capture


@dataclass
class CapturedCall:
    """What one call of a unit computed with. The constants among the inputs are in ``structure`` and the same on the
    rank that does the call again."""

    inputs: list[Snapshot]
    leaves: list[Any]
    """The flattened arguments; a tensor stands as `TensorPlace`."""
    spec: pytree.TreeSpec
    buffers: dict[str, Snapshot]
    rng: tuple[torch.Tensor, ...]
    forward_autocast: AutocastState
    backward_autocast: AutocastState
    grad_enabled: bool
    modes: tuple[bool, ...]
    """``training`` of the unit's modules."""
    record: PassRecord
    output_gradients: list[Snapshot | None] = field(default_factory=list)

    def structure(self) -> int:
        """Return a signed 64-bit number, which is equal on ranks that can do each other's call again."""
        described = (
            repr(self.spec),
            [repr(leaf) for leaf in self.leaves],
            [(len(value.layout.size), value.layout.dtype, value.layout.requires_grad) for value in self.inputs],
            sorted(self.buffers),
            self.forward_autocast,
            self.backward_autocast,
            self.grad_enabled,
            self.modes,
            [gradient is None for gradient in self.output_gradients],
            self.record.structure(),
            [digest is None for digest in self.record.digests],
        )
        return int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=8).digest(), "big", signed=True)

    @property
    def has_gradients(self) -> bool:
        return any(gradient is not None for gradient in self.output_gradients)


@dataclass(frozen=True)
class TensorPlace:
    """A tensor among flattened arguments, by its number."""

    number: int


class Capture:
    """Hooks on a unit during one step, which capture its call number ``call``, from 0.

    Activation checkpointing calls a unit again in the backward pass; such calls do not count.

    Args:
        unit: The unit.
        call: The call to capture.
        device: The rank's device.
        cost: Entered around work in hooks.
        outputs_only: Why gradients are not to be recorded; copies of the outputs are kept then.

    Attributes:
        calls: Calls of the unit so far.
        problem: Why the call was not captured; empty if it was, or did not happen yet.
    """

    def __init__(
        self,
        unit: Unit,
        call: int,
        device: torch.device,
        cost: Callable[[], AbstractContextManager[None]] = nullcontext,
        outputs_only: str = "",
    ) -> None:
        self._outputs_only = outputs_only
        self.unit, self.calls, self.problem = unit, 0, ""
        self._call, self._device, self._cost = call, device, cost
        self._captured: CapturedCall | None = None
        self._is_open = self._is_complete = False
        self._others: Any = None
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def captured(self) -> CapturedCall | None:
        """The captured call once its forward pass is over."""
        return self._captured if self._is_complete else None

    def install(self) -> None:
        """Install the hooks."""
        module = self.unit.module
        before, after = self._before_forward, self._after_forward
        if self.unit.is_compiled_in_place:  # its hooks run outside of the compiled code, but would be compiled alone
            before, after = _uncompiled(before), _uncompiled(after)
        self._handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, prepend=True),
        ]

    def remove(self) -> None:
        """Remove all hooks; what was captured remains."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._captured is not None:
            self._captured.record.release()

    def clear(self) -> None:
        """Remove all hooks, and drop what was captured."""
        self.remove()
        self._captured = None
        self._versions.clear()

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or is_in_backward():
            return
        self.calls += 1
        if self.calls != self._call + 1:
            return
        with self._cost():
            try:
                self._begin(args, kwargs)
            except UnsupportedUnit as unsupported:
                self._captured, self.problem = None, str(unsupported)
                return
        self._is_open = True

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unit = self.unit
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(tensors) > MAX_TENSORS:
            raise UnsupportedUnit(f"it takes {len(tensors)} tensors")
        numbers = {key: number for number, key in enumerate(tensors)}
        places = [_place(leaf, numbers) for leaf in leaves]
        buffers = dict(unit.module.named_buffers())
        self._versions = {
            name: (buffer, -1 if buffer.is_inference() else buffer._version) for name, buffer in buffers.items()
        }
        autocast = AutocastState.read(self._device)
        record = PassRecord(
            unit.module, self._take_gradient, self._cost, self._outputs_only, copies=bool(self._outputs_only)
        )
        self._captured = CapturedCall(
            inputs=[take_snapshot(tensor) for tensor in tensors.values()],
            leaves=places,
            spec=spec,
            buffers={
                name: take_snapshot(buffer)
                for name, buffer in buffers.items()
                if unit.changing_buffers is None or name in unit.changing_buffers
            },
            rng=rng_states(self._device),
            forward_autocast=autocast,
            backward_autocast=autocast,
            grad_enabled=torch.is_grad_enabled(),
            modes=tuple(module.training for module in unit.module.modules()),
            record=record,
        )
        self._others = _other_rng_states()
        record.begin(list(tensors.values()))

    def _after_forward(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_open or is_in_backward():
            return
        self._is_open = False
        with self._cost():
            try:
                self._finish(outputs)
            except UnsupportedUnit as unsupported:
                self._captured, self.problem = None, str(unsupported)

    def _finish(self, outputs: Any) -> None:
        captured = self._captured
        assert captured is not None
        if self._others != _other_rng_states():
            raise UnsupportedUnit("it draws from Python's or numpy's random numbers: draw from torch's")
        now, is_first = dict(self.unit.module.named_buffers()), self.unit.changing_buffers is None
        changed = {
            name
            for name, (buffer, version) in self._versions.items()
            if now.get(name) is not buffer
            or (version >= 0 and buffer._version != version)
            # some operations leave the version as it is
            or (is_first and not torch.equal(captured.buffers[name].tensor(copy=False), buffer))
        }
        self._versions.clear()
        self.unit.changing_buffers = changed | (self.unit.changing_buffers or set(self.unit.statistics()))
        if not changed <= set(captured.buffers):
            raise UnsupportedUnit("its forward pass changes a buffer that earlier ones did not change")
        captured.buffers = {name: captured.buffers[name] for name in sorted(self.unit.changing_buffers)}
        captured.record.finish_forward(outputs)
        captured.output_gradients = [None] * len(captured.record.outputs)
        captured.record.outputs.clear()  # the graph behind them must not outlive the step
        self._is_complete = True

    def _take_gradient(self, number: int, gradient: torch.Tensor) -> None:
        captured = self._captured
        if captured is None:
            return
        try:
            captured.output_gradients[number] = take_snapshot(gradient)
        except UnsupportedUnit as unsupported:
            self._captured, self.problem = None, str(unsupported)
            return
        captured.backward_autocast = AutocastState.read(self._device)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    outside: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return outside


def _place(leaf: Any, numbers: dict[int, int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorPlace(numbers[id(leaf)])
    if not isinstance(leaf, _CONSTANTS):
        raise UnsupportedUnit(f"its arguments contain a {type(leaf).__qualname__}")
    return leaf
