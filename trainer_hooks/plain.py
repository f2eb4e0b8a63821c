"""A job that starts from an ordinary checkpoint: each rank reads what it needs of it into what is tracked.

Of Everstep's own checkpoints all comes back, the step too. Of others the tensors of modules must all be there; an
optimizer or another object that is not stays as it was made, which is said in the log. Steps then begin at 1.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from everstep.errors import NotRestorable
from trainer_hooks.module_names import named_modules, unwrapped
from trainer_hooks.plain_files import Checkpoint, Path, open_checkpoint
from trainer_hooks.python_state import Merged, PythonState, decode, difference
from trainer_hooks.restore.before import Before
from trainer_hooks.snapshot.blob import as_bytes, dtype_name
from trainer_hooks.snapshot.copy import part_of
from trainer_hooks.snapshot.layout import Part, Sharing, Tensor
from trainer_hooks.state import TrackedState, TrackedTensor
from trainer_hooks.tracked_objects import TrackedObjects

log = logging.getLogger(__name__)

_VERSION = "everstep.version"
_BLOB = "everstep.blob"
_OWN = re.compile(r"everstep\.own\.(\d{1,7})\.(.+)")


def read_checkpoint(url: str, objects: Mapping[str, object], state: TrackedState, rank: int, world: int) -> Start:
    """Reads the checkpoint at ``url`` into the tensors of ``state``, which tracks ``objects``. What is no tensor is
    read too, and put into the objects by ``finish``.

    Each rank calls it for itself; there is no collective. Raises NotRestorable with what is missing or does not fit,
    Damaged where what is stored is not what was written, OSError where reading fails.
    """
    started = Start(open_checkpoint(url), objects, state, rank)
    try:
        started.read(world)
    except Exception:
        started.undo()
        raise
    return started


class Start:
    """A checkpoint on its way into a rank's objects."""

    def __init__(self, checkpoint: Checkpoint, objects: Mapping[str, object], state: TrackedState, rank: int) -> None:
        self._checkpoint = checkpoint
        self._state = state
        self._rank = rank
        tracked = TrackedObjects(objects)
        self._modules: defaultdict[str, list[torch.nn.Module]] = defaultdict(list)
        self._optimizers: defaultdict[str, list[torch.optim.Optimizer]] = defaultdict(list)
        self._others = tracked.others
        for key, module in tracked.modules:
            self._modules[key].append(module)
        for key, optimizer in tracked.optimizers:
            self._optimizers[key].append(optimizer)
        self._step = 0
        self._puts: list[Callable[[], object]] = []
        self._names: dict[int, str] = {}
        self._prefixes: dict[str, str | None] = {}
        self._within: dict[str, list[str]] = defaultdict(list)
        self._rows: dict[str, list[int]] = defaultdict(list)
        self._stored_as: dict[str, str] = {}
        for key in checkpoint.paths:
            name = _plain(key)
            self._stored_as[name] = key if name not in checkpoint.paths else name
            self._within[name.rpartition(".")[0]].append(key)
            if (own := _OWN.fullmatch(key)) is not None:
                self._rows[own[2]].append(int(own[1]))
        self._before = Before(state, values=False)

    def read(self, world: int) -> None:
        """All that this rank needs."""
        self._fill_tensors(world)
        if _VERSION in self._checkpoint.tensors:
            self._read_blob()
        else:
            self._read_objects()

    def finish(self) -> int:
        """Puts what is no tensor into the objects; returns the step the checkpoint is of, 0 where it does not say."""
        for put in self._puts:
            put()
        self._checkpoint.close()
        self._state.settle()
        log.info("started from %s at step %d", self._checkpoint.url, self._step)
        return self._step

    def undo(self) -> None:
        """Takes away the optimizers' state that was made for this checkpoint: another one may have none of it."""
        self._checkpoint.close()
        self._before.undo()

    # --- tensors

    def _fill_tensors(self, world: int) -> None:
        """Parameters, buffers and moments."""
        live = self._state.tensors()
        parts = {p.name: p for p in self._state.layout(live, self._rank, world).parts}
        mine = [p for p in parts.values() if p.name.partition(".")[0] in self._modules]
        keys = self._keys_of(mine)
        catalog = [self._as_stored(part, keys[part.name]) for part in mine]
        self._names = {id(t.place[t.key]): t.name for t in live if t.parameter}
        moments = list(self._moments())
        stored = self._checkpoint.tensors
        for top, parameter, name, key in moments:
            if key in stored:
                full, (dtype, shape) = f"{top}.{name}.{key.rpartition('.')[2]}", stored[key]
                keys[full] = key
                catalog.append(Tensor(full, dtype_name(dtype), dtype.itemsize, shape, False))
            else:
                optimizer = next(o for o in self._optimizers[top] if _trains(o, parameter))
                optimizer.state[parameter][key.rpartition(".")[2]] = self._checkpoint.value(key)
        for index, target in self._state.targets(tuple(catalog)):
            self._fill(target, catalog[index], keys[catalog[index].name])

    def _keys_of(self, parts: Iterable[Part]) -> dict[str, str]:
        """Where each tensor of a module is. Raises NotRestorable naming what is nowhere."""
        keys: dict[str, str] = {}
        missing: list[str] = []
        stored = self._checkpoint.tensors
        for part in parts:
            names = (part.name, *part.aliases)
            key = next((k for name in names for k in self._places(name) if k in stored), None)
            if key is None:
                missing.append(part.name)
            else:
                keys[part.name] = key
        if missing:
            raise NotRestorable(
                f"{self._checkpoint.url} has not all that is tracked: {len(missing)} of {len(keys) + len(missing)} "
                f"tensors of modules are not in it ({', '.join(missing[:3])}); it has {len(stored)} tensors "
                f"({', '.join(sorted(stored)[:3])}). Track the module under the key it was saved under"
            )
        return keys

    def _places(self, name: str) -> Iterator[str]:
        """Keys under which it may be, those of a model that was compiled when it was saved among them."""
        top, _, rest = name.partition(".")
        for prefix in _prefixes(top, ("model", "state_dict") if len(self._modules) == 1 else None):
            for place in (f"{prefix}{rest}", f"{prefix}module.{rest}"):
                yield self._stored_as.get(place, place)

    def _as_stored(self, part: Part, key: str) -> Tensor:
        """A catalog entry that the live tensor fits; torch converts between dtypes while it copies."""
        shape = part.shape[1:] if part.sharing is Sharing.OWN else part.shape
        stored = self._checkpoint.tensors
        if stored[key][1] != shape:
            raise NotRestorable(
                f"{part.name} is {list(shape)} now, and {list(stored[key][1])} in {self._checkpoint.url}"
            )
        rows = sorted(self._rows.get(part.name, ()))
        if not rows:
            return Tensor(part.name, part.dtype, part.itemsize, shape, False)
        return Tensor(part.name, part.dtype, part.itemsize, (rows[-1] + 1, *shape), True, ranks=tuple(rows))

    def _moments(self) -> Iterator[tuple[str, torch.Tensor, str, str]]:
        """What the checkpoint has of optimizers' state: optimizer, parameter and its full name, and the key."""
        for top in self._optimizers:
            prefix = self._prefix(top)
            for number, parameter in enumerate(p for group in self._groups_of(top) for p in group["params"]):
                name = self._names.get(id(parameter), "")
                for called in (name.partition(".")[2], name, str(number)) if name and prefix else ():
                    found = self._within[f"{prefix}.state.{called}"]
                    yield from ((top, parameter, name, key) for key in found)
                    if found:
                        break

    def _prefix(self, top: str) -> str | None:
        """The key under which an optimizer's state is, or None where it is not in the checkpoint."""
        if top not in self._prefixes:
            usual = ("optimizer", "optim") if len(self._optimizers) == 1 else ()
            candidates = [prefix.rstrip(".") for prefix in _prefixes(top, usual) if prefix]
            found = (
                p for p in candidates if any(key.startswith(f"{p}.param_groups.") for key in self._checkpoint.paths)
            )
            self._prefixes[top] = next(found, None)
            if self._prefixes[top] is None:
                log.warning("%s has no state of %s: it starts as it was made", self._checkpoint.url, top)
        return self._prefixes[top]

    def _groups_of(self, top: str) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers[top] for group in optimizer.param_groups]

    def _fill(self, target: TrackedTensor, tensor: Tensor, key: str) -> None:
        """Of a buffer that each rank stored for itself the values that this one begins with."""
        if tensor.own:
            key = f"everstep.own.{tensor.row_of(self._rank)}.{tensor.name}"
        if not target.box.volume:
            return
        with torch.no_grad():
            for box, value in self._checkpoint.read(key, target.box):
                part_of(target.local, target.box, box).copy_(value)

    # --- everything else

    def _read_blob(self) -> None:
        """The Python state of Everstep's own checkpoint: this rank's, or the first's for a rank that is new, and what
        that one did not know from others."""
        ranks = [int(k.rpartition(".")[2]) for k in self._checkpoint.tensors if k.startswith(f"{_BLOB}.")]
        names, told = self._state.python_names(), list[PythonState]()
        for rank in sorted(ranks, key=lambda rank: (rank != self._rank, rank)):
            told.append(decode(as_bytes(self._checkpoint.value(f"{_BLOB}.{rank}"))))
            if not names.difference(*(state.names for state in told)):
                break
        merged = Merged(told, names)
        self._state.require_python(merged)
        self._puts.append(partial(self._state.load_python, merged))
        _, self._step = self._checkpoint.value(_VERSION).tolist()

    def _under(self, prefix: str) -> Any:
        """The nested state under a key, or None where there is nothing."""
        found = [key for name, key in self._stored_as.items() if name.startswith(f"{prefix}.")]
        if not found:
            return None
        return _nested({_rest(self._checkpoint.paths[key], prefix): self._checkpoint.value(key) for key in found})

    def _read_objects(self) -> None:
        """Hyper-parameters, modules' extra state, and the state of objects that are neither modules nor optimizers."""
        for top, roots in self._modules.items():
            for name, module in (found for root in roots for found in named_modules(top, root)):
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                    self._read_extra(f"{name}._extra_state", module)
        for top in self._optimizers:
            if (prefix := self._prefix(top)) is not None:
                groups = self._under(f"{prefix}.param_groups")
                self._read_groups(top, groups if isinstance(groups, list) else self._by_name(top, prefix))
        for key, tracked in self._others.items():
            found = [f for p in _prefixes(key, None) if (f := self._under(p.rstrip("."))) is not None]
            if found:
                self._puts.append(partial(tracked.load_state_dict, found[0]))
            else:
                log.warning("%s has no state of %s: it starts as it was made", self._checkpoint.url, key)

    def _read_extra(self, name: str, module: torch.nn.Module) -> None:
        for key in self._places(name):
            found = self._checkpoint.value(key) if key in self._checkpoint.paths else self._under(key)
            if found is not None:
                self._puts.append(partial(module.set_extra_state, found))
                return
        log.warning("%s has no %s: it starts as it was made", self._checkpoint.url, name)

    def _read_groups(self, top: str, groups: list[dict[str, Any]]) -> None:
        live = self._groups_of(top)
        if len(groups) != len(live):
            now, then = len(live), len(groups)
            raise NotRestorable(f"{top} has {now} parameter groups now, and {then} in {self._checkpoint.url}")
        for group, stored in zip(live, groups, strict=True):
            self._puts.append(partial(group.update, {key: value for key, value in stored.items() if key != "params"}))

    def _by_name(self, top: str, prefix: str) -> list[dict[str, Any]]:
        """The options of each live group, where they are stored for each parameter by its name
        (``flatten_optimizer_state_dict``, as torchtitan has it)."""
        stored: dict[str, dict[str, Any]] = defaultdict(dict)
        begin = f"{prefix}.param_groups."
        for key in self._checkpoint.paths:
            if key.startswith(begin):
                name, _, option = _plain(key.removeprefix(begin)).rpartition(".")
                stored[name][option] = self._checkpoint.value(key)
        return [self._agreed(top, stored, self._names_in(group)) for group in self._groups_of(top)]

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        """Of a group's parameters that are tracked, without the key of their module."""
        names = (self._names.get(id(parameter), "") for parameter in group["params"])
        return [name.partition(".")[2] for name in names if name]

    def _agreed(self, top: str, stored: Mapping[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        """What is stored for these names. Raises NotRestorable where that differs, or is not there."""
        for name in names:
            if name not in stored:
                raise NotRestorable(f"{self._checkpoint.url} has no options of {name}, which {top} trains now")
            if different := difference(stored[names[0]], stored[name]):
                raise NotRestorable(
                    f"{top} has {names[0]} and {name} in one parameter group now, and in {self._checkpoint.url} they "
                    f"differ in {different}: keep them in groups of their own"
                )
        return stored[names[0]] if names else {}


def _trains(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(parameter is one for group in optimizer.param_groups for one in group["params"])


def _plain(key: str) -> str:
    """A key as it would be, had the model not been compiled."""
    return unwrapped(key).removeprefix(".")


def _prefixes(top: str, usual: tuple[str, ...] | None) -> Iterator[str]:
    """Under which keys an object may have been saved: its own, those that are usual, and none at all."""
    for key in dict.fromkeys((top, *(usual or ()))):
        yield f"{key}."
        yield f"{key}_state_dict."
    if usual is not None:
        yield ""


def _rest(path: Path, prefix: str) -> Path:
    """A path without the parts that make up a flattened key."""
    return next(path[n:] for n in range(1, len(path) + 1) if len(_plain(".".join(map(str, path[:n])))) >= len(prefix))


def _nested(leaves: Mapping[Path, Any]) -> Any:
    """Nested state from its leaves: integers in paths are indices of lists."""
    if () in leaves:
        return leaves[()]
    heads = dict.fromkeys(path[0] for path in leaves)
    made = {head: _nested({p[1:]: v for p, v in leaves.items() if p[0] == head}) for head in heads}
    if made and all(isinstance(head, int) for head in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made
