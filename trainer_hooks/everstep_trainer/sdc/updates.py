"""Audit optimizer updates: do a part of an update again on copies, and compare the bits.

Before the update a part of the parameters, gradients and optimizer state is copied: whole small tensors, and slices of
large ones. Right after it a copy of the optimizer makes the same update on the copies. Successive audits go through all
parameters. Where results differ, the ranks bring the copies to two other ranks, which do the update too.

The results are compared on the device, and the comparison is read in the next step: no audit waits for a GPU.

Only optimizers of torch.optim are audited, since a copy of another one may share more than its tensors. Slices of a
tensor are updated as the whole tensor is, bit for bit, unless a kernel treats the ends of a range otherwise; so each
kind of update is first tried both ways.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import optim
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils.hooks import RemovableHandle

from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import combined_digest, to_hex
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.witnesses import Parcel, describe_difference, exchange_parcel, witnesses_of
from everstep_trainer.state.tensors import local_part
from everstep_trainer.state.tracked_objects import TrackedObjects, named_modules

log = logging.getLogger(__name__)

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimizers that update each element on its own."""
ALIGNMENT = 4096
"""Slices begin at multiples of this."""
PARTS = 256
"""Audits that go through all elements, unless the parts were then too small."""
MIN_PART_ELEMENTS = 1 << 16
MAX_PART_ELEMENTS = 1 << 22
"""Bounds the memory of an audit: about 40 bytes for each element."""
MAX_WHOLE_ELEMENTS = 1 << 22
"""Elements of a tensor that is copied whole where slices do not do."""
MAX_TRIED_ELEMENTS = 1 << 20
"""Elements of a tensor on which it is tried whether slices do."""
MAX_CASES = 4
"""Most ranks whose differing updates are done again elsewhere in one step."""
PARAMETER, GRADIENT = "parameter", "gradient"  # keys beside those of the state, which torch names otherwise

Tensors = dict[str, torch.Tensor]


class _ParameterSlice(NamedTuple):
    """A parameter, or a slice of it: elements ``start`` to ``stop`` of its flat local part."""

    group: int
    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def is_slice(self) -> bool:
        return self.stop - self.start < local_part(self.parameter).numel()


class _Inputs(NamedTuple):
    """What an update of one unit reads: copies of tensors, and the rest of the state."""

    unit: _ParameterSlice
    tensors: Tensors
    others: dict[str, Any]


class _Kind(NamedTuple):
    """Updates that the same kernels make."""

    dtype: torch.dtype
    device: str
    flags: tuple[object, ...]


# ---- an update done again


class UpdateRecord:
    """An optimizer as it is before an update, with which updates of some tensors can be repeated."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._type = type(optimizer)
        self._attributes = {key: value for key, value in vars(optimizer).items() if key not in _OWN_ATTRIBUTES}
        self.options = [_options_of(group) for group in optimizer.param_groups]

    def repeat(self, inputs: Sequence[tuple[int, Tensors, Mapping[str, Any]]]) -> list[Tensors]:
        """Update copies of tensors; return each one's parameter and state after it.

        Args:
            inputs: For each parameter the number of its group, its tensors, and the rest of its state.
        """
        optimizer = object.__new__(self._type)
        vars(optimizer).update(self._attributes)
        vars(optimizer).update({name: OrderedDict() for name in _HOOK_ATTRIBUTES})
        optimizer.state = defaultdict(dict)
        groups: dict[int, list[torch.Tensor]] = {}
        parameters = []
        for number, tensors, others in inputs:
            copies = {key: tensor.clone() for key, tensor in tensors.items()}
            parameter, gradient = copies.pop(PARAMETER), copies.pop(GRADIENT)
            parameter.grad = gradient
            if copies or others:
                optimizer.state[parameter] = {**copies, **others}
            groups.setdefault(number, []).append(parameter)
            parameters.append(parameter)
        optimizer.param_groups = [{**self.options[number], "params": own} for number, own in groups.items()]
        with torch.no_grad():
            inspect.unwrap(self._type.step)(optimizer)
        return [{PARAMETER: parameter, **_tensors_of(optimizer.state[parameter])} for parameter in parameters]


_HOOK_ATTRIBUTES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN_ATTRIBUTES = {*_HOOK_ATTRIBUTES, "state", "param_groups", "step"}  # a scheduler wraps ``step``


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options with the implementation that torch chooses for all of the group's tensors."""
    options = {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    if options.get("foreach", True) is None and not options.get("fused"):
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        is_differentiable = bool(options.get("differentiable"))
        _, foreach = _default_to_fused_or_foreach(trained, is_differentiable, use_fused=False)
        is_refused = isinstance(options.get("lr"), torch.Tensor) and not options.get("capturable")
        options["foreach"] = foreach and not is_refused
    return options


def _tensors_of(state: Mapping[str, Any]) -> Tensors:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def digest_of(results: Sequence[Tensors]) -> torch.Tensor:
    return combined_digest([tensors[key] for tensors in results for key in sorted(tensors)])


# ---- the parts of one optimizer


class _ParameterRotation:
    """The parameters of one optimizer in parts, audited one after the other."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.whole_kinds: set[_Kind] = set()
        self._size = -1
        self._parts: list[list[_ParameterSlice]] = []
        self._next = 0

    def __len__(self) -> int:
        self._plan()
        return len(self._parts)

    def take(self) -> list[_ParameterSlice]:
        """Return the next part."""
        self._plan()
        part = self._parts[self._next % len(self._parts)] if self._parts else []
        self._next += 1
        return part

    def replan(self) -> None:
        self._size = -1

    def largest_of_each_kind(self) -> list[_ParameterSlice]:
        """Return a whole parameter of each kind on which slices can be tried."""
        found: dict[_Kind, _ParameterSlice] = {}
        for number, parameter in self._parameters():
            size = local_part(parameter).numel()
            unit = _ParameterSlice(number, parameter, 0, size)
            kind = kind_of(self._optimizer, unit)
            if 2 * ALIGNMENT < size <= MAX_TRIED_ELEMENTS and (kind not in found or size > found[kind].stop):
                found[kind] = unit
        return list(found.values())

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and local_part(parameter).numel():
                    yield number, parameter

    def _plan(self) -> None:
        size = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if size == self._size:
            return
        self._size = size
        parameters = list(self._parameters())
        total = sum(local_part(parameter).numel() for _, parameter in parameters)
        wanted = min(MAX_PART_ELEMENTS, max(MIN_PART_ELEMENTS, -(-total // PARTS)))
        wanted = -(-wanted // ALIGNMENT) * ALIGNMENT
        self._parts, room = [], 0
        for number, parameter in parameters:
            count = local_part(parameter).numel()
            whole = _ParameterSlice(number, parameter, 0, count)
            slices = [whole]
            if not local_part(parameter).is_contiguous() or kind_of(self._optimizer, whole) in self.whole_kinds:
                if count > MAX_WHOLE_ELEMENTS:
                    continue
            elif count > wanted:
                bounds = [*range(0, count, wanted), count]
                slices = [_ParameterSlice(number, parameter, start, stop) for start, stop in pairwise(bounds)]
            for unit in slices:
                if room < unit.stop - unit.start or not self._parts:
                    self._parts.append([])
                    room = wanted
                self._parts[-1].append(unit)
                room -= unit.stop - unit.start


def kind_of(optimizer: optim.Optimizer, unit: _ParameterSlice) -> _Kind:
    group = optimizer.param_groups[unit.group]
    local = local_part(unit.parameter)
    flags = tuple(group.get(flag) for flag in ("foreach", "fused", "capturable"))
    return _Kind(local.dtype, local.device.type, flags)


def inputs_of(optimizer: optim.Optimizer, unit: _ParameterSlice) -> _Inputs | None:
    """Copy what the next update of ``unit`` reads; None if it has no gradient, or not one of its own layout."""
    gradient = unit.parameter.grad
    state = optimizer.state.get(unit.parameter, {})
    if gradient is None or gradient.layout is not torch.strided or gradient.dtype != unit.parameter.dtype:
        return None
    found = {PARAMETER: unit.parameter.detach(), GRADIENT: gradient.detach(), **_tensors_of(state)}
    tensors = {key: _part_of(value, unit) for key, value in found.items()}
    if any(tensor is None for tensor in tensors.values()):
        return None
    copies = {key: tensor.clone() for key, tensor in tensors.items() if tensor is not None}
    others = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    return _Inputs(unit, copies, others)


def results_of(optimizer: optim.Optimizer, unit: _ParameterSlice) -> Tensors:
    """Copy what an update of ``unit`` wrote."""
    found = {PARAMETER: unit.parameter.detach(), **_tensors_of(optimizer.state.get(unit.parameter, {}))}
    parts = {key: _part_of(value, unit) for key, value in found.items()}
    return {key: part.clone() for key, part in parts.items() if part is not None}


def _part_of(tensor: torch.Tensor, unit: _ParameterSlice) -> torch.Tensor | None:
    """Return a tensor's elements of the unit; all of a tensor that is not of the parameter's shape."""
    local, whole = local_part(tensor), local_part(unit.parameter)
    if not unit.is_slice or local.shape != whole.shape or not local.ndim:
        return local
    return local.view(-1)[unit.start : unit.stop] if local.is_contiguous() else None


# ---- the audit


class _Comparison(NamedTuple):
    """One optimizer's update in one step, done twice."""

    number: int
    record: UpdateRecord
    inputs: list[_Inputs]
    results: list[Tensors]
    repeated: list[Tensors]
    differs: torch.Tensor
    is_first: bool


class UpdateAudit(Audit):
    """Repeats a part of each optimizer's first update in a due step."""

    kind = AuditKind.UPDATE

    def __init__(self, setup: AuditSetup) -> None:
        super().__init__(setup)
        tracked = TrackedObjects(setup.objects)
        self._names = {
            id(parameter): f"{name}.{key}"
            for top, root in tracked.modules
            for name, module in named_modules(top, root)
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        self._optimizers = [optimizer for _, optimizer in tracked.optimizers]
        self._off: dict[int, str] = {}  # why, by the number of the rotation
        self._calls = [self._calls_around(number) for number in range(len(self._optimizers))]
        self._rotations = [_ParameterRotation(optimizer) for optimizer in self._optimizers]
        self._tried: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._last_hooks: dict[int, int] = {}  # the id of this audit's hook before each optimizer's step
        self._captured: dict[int, tuple[UpdateRecord, list[_Inputs]]] = {}
        self._comparisons: list[_Comparison] = []
        self._pending: tuple[int, torch.Tensor, list[_Comparison]] | None = None
        for number, (key, optimizer) in enumerate(tracked.optimizers):
            if type(optimizer) not in ELEMENTWISE:
                self._switch_off(number, f"{key}, a {type(optimizer).__qualname__}, cannot be repeated by parts")

    @property
    def rounds(self) -> int:
        parts = [len(rotation) for number, rotation in enumerate(self._rotations) if number not in self._off]
        return max(parts, default=0) + 1 if parts else 0  # the last part's comparison is read in the next audit

    def gaps(self) -> Iterator[str]:
        yield from (f"updates are not checked: {why}" for why in dict.fromkeys(self._off.values()))

    def is_needed(self, step: int) -> bool:
        return self._pending is not None

    def begin_step(self, step: int, *, due: bool) -> None:
        self._remove_hooks()
        self._captured.clear()
        self._comparisons = []
        if due:
            for number in range(len(self._optimizers)):
                if number not in self._off:
                    self._watch(number)

    def before_update(self, step: int, *, due: bool) -> None:
        self._resolve()

    def after_update(self, step: int, *, due: bool) -> None:
        self._remove_hooks()
        if not due:
            return
        comparisons, self._comparisons = self._comparisons, []
        differs = torch.zeros(2, dtype=torch.int64, device=self.setup.device)  # at all, and in a first audit
        for comparison in comparisons:
            differs[0] |= comparison.differs.to(differs.device)
            if comparison.is_first:
                differs[1] |= comparison.differs.to(differs.device)
        ranks = differs.clone()
        if self.setup.world_size > 1:
            with self.waiting():
                dist.all_reduce(ranks)
        self._pending = step, torch.cat([differs, ranks]), comparisons

    def close(self) -> None:
        self._remove_hooks()
        self._captured.clear()
        self._comparisons, self._pending = [], None

    # -- capture and compare, around one optimizer's step

    def _watch(self, number: int) -> None:
        optimizer, (before, after) = self._optimizers[number], self._calls[number]
        pre, post = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        # What other hooks change before the update, such as by clipping, is its input; what they change after it is not
        # its result.
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict, typed as a dict
        hooks.move_to_end(post.id, last=False)
        self._last_hooks[number] = pre.id
        self._hooks += pre, post

    def _calls_around(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what is called before and after a step of one optimizer."""

        def before(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            is_last = next(reversed(optimizer._optimizer_step_pre_hooks)) == self._last_hooks.get(number)
            if is_last and number not in self._captured and number not in self._off:
                with self.cost(), torch.no_grad():
                    self._capture(number, has_closure=bool(args[1:]) or kwargs.get("closure") is not None)

        def after(*_: Any) -> None:
            if number in self._captured and all(comparison.number != number for comparison in self._comparisons):
                with self.cost(), torch.no_grad():
                    self._compare(number)

        outside: Any = torch.compiler.disable
        return outside(before), outside(after)

    def _capture(self, number: int, *, has_closure: bool) -> None:
        optimizer = self._optimizers[number]
        if has_closure or getattr(optimizer, "grad_scale", None) is not None:
            why = "takes a closure" if has_closure else "unscales gradients itself"
            self._switch_off(number, f"the step of {type(optimizer).__qualname__} {why}")
            return
        units = list(self._rotations[number].take())
        if number not in self._tried:
            units += self._rotations[number].largest_of_each_kind()
        inputs = [one for unit in units if (one := inputs_of(optimizer, unit)) is not None]
        self._captured[number] = UpdateRecord(optimizer), inputs

    def _compare(self, number: int) -> None:
        optimizer = self._optimizers[number]
        record, inputs = self._captured[number]
        if not inputs:
            return
        is_first = number not in self._tried
        if is_first:
            self._tried.add(number)
            inputs = self._try_slices(number, record, inputs)
        results = [results_of(optimizer, update.unit) for update in inputs]
        repeated = record.repeat([(update.unit.group, update.tensors, update.others) for update in inputs])
        differs = digest_of(results) != digest_of(repeated)
        self._comparisons.append(_Comparison(number, record, inputs, results, repeated, differs, is_first))

    def _try_slices(self, number: int, record: UpdateRecord, inputs: list[_Inputs]) -> list[_Inputs]:
        """Find the kinds of updates for which slices differ from the whole; return the inputs that can be compared."""
        optimizer, rotation = self._optimizers[number], self._rotations[number]
        for update in inputs:
            if update.unit.is_slice or update.unit.stop <= 2 * ALIGNMENT:
                continue
            half = update.unit.stop // 2 // ALIGNMENT * ALIGNMENT
            bounds = [0, ALIGNMENT, max(half, ALIGNMENT), update.unit.stop]
            whole = record.repeat([(update.unit.group, update.tensors, update.others)])[0]
            shape = update.tensors[PARAMETER].shape
            for start, stop in pairwise(bounds):
                cut = {
                    key: tensor.reshape(-1)[start:stop] if tensor.shape == shape and tensor.ndim else tensor
                    for key, tensor in update.tensors.items()
                }
                piece = record.repeat([(update.unit.group, cut, update.others)])[0]
                same = {
                    key: tensor.reshape(-1)[start:stop] if tensor.shape == shape and tensor.ndim else tensor
                    for key, tensor in whole.items()
                }
                if start < stop and bool((digest_of([piece]) != digest_of([same])).item()):
                    rotation.whole_kinds.add(kind_of(optimizer, update.unit))
                    break
        if rotation.whole_kinds:
            rotation.replan()
            log.info("audits of updates copy whole tensors of a %s", type(optimizer).__qualname__)
        return [
            update
            for update in inputs
            if not update.unit.is_slice or kind_of(optimizer, update.unit) not in rotation.whole_kinds
        ]

    # -- what the comparison showed

    def _resolve(self) -> None:
        """Read the last audit's comparison. A collective on all ranks if any rank's results differed."""
        if self._pending is None:
            return
        (step, flags, comparisons), self._pending = self._pending, None
        own, _, ranks, ranks_first = (int(flag) for flag in flags.tolist())
        if not ranks:
            return
        setup = self.setup
        if ranks_first == setup.world_size and self._is_unrepeatable(comparisons):
            for comparison in comparisons:
                if comparison.is_first:
                    self._switch_off(
                        comparison.number, "an update done again differs: it is not repeatable, or is compiled"
                    )
            return
        case = self._first_difference(comparisons) if own else None
        if setup.world_size == 1:
            if case is not None:
                self._report_own(step, case, expects_arbiter=False)
            return
        flagged = [torch.zeros(1, dtype=torch.int64, device=setup.device) for _ in range(setup.world_size)]
        # A digest that was wrong once leaves no difference to show.
        dist.all_gather(flagged, torch.tensor([int(case is not None)], device=setup.device))
        owners = [rank for rank, flag in enumerate(flagged) if flag.item()]
        for owner in owners[:MAX_CASES]:
            self._hear(step, owner, case if owner == setup.rank else None, comparisons)

    def _is_unrepeatable(self, comparisons: list[_Comparison]) -> bool:
        """Return whether the first audit shows updates unrepeatable, rather than a device wrong.

        With several ranks it does, since all of them differ. One rank alone must differ in most parameters.
        """
        if self.setup.world_size > 1:
            return True
        units = [
            pair for comparison in comparisons for pair in zip(comparison.results, comparison.repeated, strict=True)
        ]
        wrong = sum(bool((digest_of([a]) != digest_of([b])).item()) for a, b in units)
        return 2 * wrong >= len(units)

    def _first_difference(self, comparisons: list[_Comparison]) -> tuple[_Comparison, int] | None:
        for comparison in comparisons:
            for index, (result, again) in enumerate(zip(comparison.results, comparison.repeated, strict=True)):
                if bool((digest_of([result]) != digest_of([again])).item()):
                    return comparison, index
        return None

    def _report_own(self, step: int, case: tuple[_Comparison, int], *, expects_arbiter: bool) -> None:
        comparison, index = case
        result, again = comparison.results[index], comparison.repeated[index]
        unit = comparison.inputs[index].unit
        differences = (
            (key, describe_difference(result[key], again[key]))
            for key in result
            if key in again and result[key].shape == again[key].shape
        )
        difference = next((f"{key}: {text}" for key, text in differences if text), "")
        self.report_own(
            step,
            self._unit_text(unit),
            original=to_hex(digest_of([result])),
            digest=to_hex(digest_of([again])),
            arbiter=expects_arbiter,
            difference=difference,
        )

    def _unit_text(self, unit: _ParameterSlice) -> str:
        name = self._names.get(id(unit.parameter), "parameter")
        return f"update of {name}[{unit.start}:{unit.stop}]" if unit.is_slice else f"update of {name}"

    def _hear(
        self, step: int, owner: int, case: tuple[_Comparison, int] | None, comparisons: list[_Comparison]
    ) -> None:
        """Let the owner's witnesses do its update. A collective."""
        setup = self.setup
        peer, arbiter = witnesses_of(owner, setup.nodes)
        sent: Parcel | None = None
        if case is not None:
            inputs = case[0].inputs[case[1]]
            sent = Parcel((case[0].number, inputs.unit.group), inputs.tensors, self._unit_text(inputs.unit))
            self._report_own(step, case, expects_arbiter=arbiter is not None)
        parcel: Parcel | None = None
        for witness in (peer, arbiter):
            to = witness if setup.rank == owner else None
            source = owner if setup.rank == witness else None
            parcel = exchange_parcel(sent, to=to, source=source, device=setup.device) or parcel
        if parcel is None:
            return
        number, group = parcel.numbers
        record = next((comparison.record for comparison in comparisons if comparison.number == number), None)
        if record is None:
            log.warning("the update of rank %d cannot be repeated here: this rank made none", owner)
            return
        again = record.repeat([(group, parcel.tensors, {})])
        setup.report(
            Mismatch(
                audit=self.kind,
                step=step,
                unit=parcel.text,
                owner=owner,
                role=AuditRole.PEER if setup.rank == peer else AuditRole.ARBITER,
                digest=to_hex(digest_of(again)),
                expects_arbiter=arbiter is not None,
            )
        )

    # -- hooks and the switch

    def _switch_off(self, number: int, why: str) -> None:
        self._off[number] = why
        self._captured.pop(number, None)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
