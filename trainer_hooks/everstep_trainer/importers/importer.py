"""Start a job from an ordinary checkpoint: each rank reads what it needs into the tracked objects.

Everstep's own checkpoints restore everything, including the step. Other checkpoints must have all tensors of modules.
An optimizer or other object that is missing there keeps its initial state, which is logged; steps then begin at 1.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from everstep.errors import NotRestorable
from everstep.layout.manifests import TensorInfo
from everstep_trainer.importers.checkpoint_files import CheckpointReader, KeyPath, open_checkpoint
from everstep_trainer.restore.restorer import StateBackup
from everstep_trainer.slots.copy import view_of_box
from everstep_trainer.state.layout import Sharing, TensorPart
from everstep_trainer.state.optimizer_state import to_live
from everstep_trainer.state.python_state import MergedState, PythonState, decode, describe_difference
from everstep_trainer.state.python_value_codec import as_bytes, dtype_name
from everstep_trainer.state.sharded_state import ShardedState
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_objects import TrackedObjects, named_modules, strip_wrapper_names
from everstep_trainer.state.tracked_state import Aliases, TrackedState

# ---- keys of ordinary checkpoints: names that an object may have been saved under, and nested state


def uncompiled_key(key: str) -> str:
    """Return a key as if the model had not been compiled."""
    return strip_wrapper_names(key).removeprefix(".")


def join_path(path: KeyPath) -> str:
    return uncompiled_key(".".join(map(str, path)))


def candidate_prefixes(top: str, conventional: tuple[str, ...] | None) -> Iterator[str]:
    """Yield the prefixes under which an object may have been saved: its own, conventional ones, and none."""
    for key in dict.fromkeys((top, *(conventional or ()))):
        yield f"{key}."
        yield f"{key}_state_dict."
    if conventional is not None:
        yield ""


def path_below(path: KeyPath, prefix: str) -> KeyPath:
    """Return a path without the parts that make up a flattened key."""
    return next(path[n:] for n in range(1, len(path) + 1) if len(join_path(path[:n])) >= len(prefix))


def nest_leaves(leaves: Mapping[KeyPath, Any]) -> Any:
    """Return nested state from its leaves; integers in paths are indices of lists."""
    if () in leaves:
        return leaves[()]
    heads = dict.fromkeys(path[0] for path in leaves)
    made = {head: nest_leaves({p[1:]: v for p, v in leaves.items() if p[0] == head}) for head in heads}
    if made and all(isinstance(head, int) for head in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


class CheckpointKeys:
    """The keys of one checkpoint, as if the model had not been compiled."""

    def __init__(self, checkpoint: CheckpointReader) -> None:
        self._checkpoint = checkpoint
        self._stored_as: dict[str, str] = {}
        for key in checkpoint.paths:
            name = uncompiled_key(key)
            self._stored_as[name] = key if name not in checkpoint.paths else name
        heads = (path[:n] for path in checkpoint.paths.values() for n in range(1, len(path)))
        self.top_prefixes = {"", *(f"{join_path(head)}." for head in set(heads))}
        """Prefixes of keys, up to where one dictionary is inside another."""

    def stored_key(self, key: str) -> str:
        return self._stored_as.get(key, key)

    def read_under(self, prefix: str) -> Any:
        """Return the nested state under a key, or None if there is none."""
        read, paths = self._checkpoint.read_value, self._checkpoint.paths
        found = [key for name, key in self._stored_as.items() if name.startswith(f"{prefix}.")]
        return nest_leaves({path_below(paths[key], prefix): read(key) for key in found}) if found else None


# ---- modules in an ordinary checkpoint
#
# One mapping from names to stored keys serves all tensors of a tracked module, so that none is confused with one of a
# similar name: ``model.norm.weight`` may be the norm of what was saved under ``model``, or that of a part ``model``.

log = logging.getLogger(__name__)

T = TypeVar("T")


class KeyMapping(msgspec.Struct, frozen=True):
    """A mapping from names in a tracked module to keys: a prefix to remove, and one to add."""

    added_prefix: str
    removed_prefix: str = ""

    def map(self, name: str) -> str:
        """Return the key for ``name``, which begins with the key of the tracked module."""
        return self.added_prefix + name.partition(".")[2].removeprefix(self.removed_prefix)


class StoredModules:
    """The stored parts of tracked modules, by their keys."""

    def __init__(
        self, checkpoint: CheckpointReader, keys: CheckpointKeys, modules: Mapping[str, Sequence[torch.nn.Module]]
    ) -> None:
        self._checkpoint, self._keys, self._modules = checkpoint, keys, modules
        self._rules: dict[str, KeyMapping] = {}

    def map_keys(self, parts: Iterable[TensorPart]) -> dict[str, str]:
        """Return the stored key of each tensor. Raises NotRestorable, naming missing ones."""
        of: dict[str, list[TensorPart]] = defaultdict(list)
        for part in parts:
            of[part.name.partition(".")[0]].append(part)
        keys: dict[str, str] = {}
        missing: list[str] = []
        for top, mine in of.items():
            found: dict[str, str] = {}
            for rule in self._possible(top):
                under = dict(self._found(mine, rule))
                if len(under) > len(found) or top not in self._rules:
                    self._rules[top], found = rule, under
                if len(under) == len(mine):
                    break
            missing += [part.name for part in mine if part.name not in found]
            keys |= found
        if missing:
            stored = self._checkpoint.tensors
            raise NotRestorable(
                f"{self._checkpoint.url} lacks {len(missing)} of {len(keys) + len(missing)} tensors of tracked modules "
                f"({', '.join(missing[:3])}); it has {len(stored)} tensors ({', '.join(sorted(stored)[:3])}). Track "
                "the module under the key it was saved under, and tie the tensors that were tied: they are stored "
                "under one name"
            )
        return keys

    def extra_states(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        """Yield modules with their stored extra state."""
        for top, roots in self._modules.items():
            for name, module in (found for root in roots for found in named_modules(top, root)):
                if type(module).get_extra_state is torch.nn.Module.get_extra_state:
                    continue
                rules = [self._rules[top]] if top in self._rules else self._possible(top)
                found = [value for rule in rules if (value := self._extra(f"{name}._extra_state", rule)) is not None]
                if found:
                    yield module, found[0]
                else:
                    log.warning("%s has no %s._extra_state: it keeps its initial state", self._checkpoint.url, name)

    def _extra(self, name: str, rule: KeyMapping) -> Any:
        key = self._keys.stored_key(rule.map(name))
        in_one_piece = key in self._checkpoint.paths
        return self._checkpoint.read_value(key) if in_one_piece else self._keys.read_under(rule.map(name))

    def _found(self, parts: Sequence[TensorPart], rule: KeyMapping) -> Iterator[tuple[str, str]]:
        for part in parts:
            places = (self._keys.stored_key(rule.map(name)) for name in (part.name, *part.aliases))
            key = next((place for place in places if place in self._checkpoint.tensors), None)
            if key is not None:
                yield part.name, key

    def _possible(self, top: str) -> Iterator[KeyMapping]:
        """Yield possible mappings: first prefixes that are dictionaries, last those with a base model's name."""
        usual = ("model", "state_dict") if len(self._modules) == 1 else None
        whole = self._keys.top_prefixes
        for prefix in sorted(candidate_prefixes(top, usual), key=lambda prefix: prefix not in whole):
            yield KeyMapping(prefix)
            yield KeyMapping(f"{prefix}module.")
        for base in {_base(root) for root in self._modules[top]} - {""} if usual else ():
            yield KeyMapping(f"{base}.")
            yield KeyMapping("", removed_prefix=f"{base}.")


def _base(root: torch.nn.Module) -> str:
    names = (getattr(module, "base_model_prefix", "") for module in root.modules())
    return next((name for name in names if name and isinstance(name, str)), "")


# ---- optimizers in an ordinary checkpoint
#
# State is stored by parameters' names, as by get_optimizer_state_dict, or by numbers, as by ``state_dict()``; nested,
# or flattened by name, as torchtitan saves.


class StoredMoment(msgspec.Struct, frozen=True):
    """A part of a parameter's state, and the keys that store it: several if it is nested in lists or dictionaries."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    full_name: str  # as a tensor's
    name: str
    keys: tuple[str, ...]


class StoredOptimizers:
    """The stored state of tracked optimizers, by their keys."""

    def __init__(
        self, checkpoint: CheckpointReader, keys: CheckpointKeys, optimizers: Mapping[str, list[torch.optim.Optimizer]]
    ) -> None:
        self._checkpoint, self._keys, self._optimizers = checkpoint, keys, optimizers
        self._names: dict[int, str] = {}
        self._prefixes: dict[str, str | None] = {}
        self._within: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """Stored keys by the key of a parameter's state and the name in it."""
        self._depth: dict[str, int] = {}
        for key, path in checkpoint.paths.items():
            above, _, name = uncompiled_key(key).rpartition(".")
            at = next((n + 2 for n, part in enumerate(path[:-3]) if part == "state"), 0)
            if at:
                above, name = join_path(path[:at]), str(path[at])
                self._depth[key] = at + 1
            self._within[above][name].append(key)

    def moments(self, names: dict[int, str], aliases: Aliases) -> Iterator[StoredMoment]:
        """Yield the stored parts of parameters' state; ``names`` has the full names of parameters by identity."""
        self._names = names
        for top, optimizers in self._optimizers.items():
            prefix, number = self._prefix(top), -1
            for optimizer in optimizers:
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    number += 1
                    name = names.get(id(parameter), "")
                    called_by = (name.partition(".")[2], name, str(number))
                    others = (other.partition(".")[2] for other in aliases.get(name, ()))
                    for called in (*called_by, *others) if name and prefix else ():
                        found = self._within.get(f"{prefix}.state.{called}", {})
                        for part, keys in found.items():
                            yield StoredMoment(optimizer, parameter, f"{top}.{name}.{part}", part, tuple(keys))
                        if found:
                            break

    def read_value(self, moment: StoredMoment) -> Any:
        """Return the value of a part that is no tensor, or contains tensors."""
        found = {self._checkpoint.paths[key][self._depth.get(key, 0) :]: key for key in moment.keys}
        if len(found) == 1 and moment.keys[0] not in self._depth:
            return self._checkpoint.read_value(moment.keys[0])
        return nest_leaves({path: self._checkpoint.read_value(key) for path, key in found.items()})

    def group_options(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each parameter group with its stored hyper-parameters, after ``moments``. Raises NotRestorable."""
        for top in self._optimizers:
            if (prefix := self._prefix(top)) is None:
                continue
            groups, live = self._keys.read_under(f"{prefix}.param_groups"), self._groups_of(top)
            if not isinstance(groups, list):
                groups = self._by_name(top, prefix)
            if len(groups) != len(live):
                now, then = len(live), len(groups)
                raise NotRestorable(f"{top} has {now} parameter groups now, and {then} in {self._checkpoint.url}")
            for group, stored in zip(live, groups, strict=True):
                yield group, {key: value for key, value in stored.items() if key != "params"}

    def _prefix(self, top: str) -> str | None:
        """Return the key under which an optimizer's state is stored, or None."""
        if top not in self._prefixes:
            usual = ("optimizer", "optim") if len(self._optimizers) == 1 else ()
            candidates = [prefix.rstrip(".") for prefix in candidate_prefixes(top, usual) if prefix]
            paths = self._checkpoint.paths
            found = (p for p in candidates if any(key.startswith(f"{p}.param_groups.") for key in paths))
            self._prefixes[top] = next(found, None)
            if self._prefixes[top] is None:
                log.warning("%s has no state of %s: it keeps its initial state", self._checkpoint.url, top)
        return self._prefixes[top]

    def _groups_of(self, top: str) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers[top] for group in optimizer.param_groups]

    def _by_name(self, top: str, prefix: str) -> list[dict[str, Any]]:
        """Return the options of each live group from those stored per parameter name (flatten_optimizer_state_dict)."""
        stored: dict[str, dict[str, Any]] = defaultdict(dict)
        begin = f"{prefix}.param_groups."
        for key in self._checkpoint.paths:
            if key.startswith(begin):
                name, _, option = uncompiled_key(key.removeprefix(begin)).rpartition(".")
                stored[name][option] = self._checkpoint.read_value(key)
        return [self._agreed(top, stored, group) for group in self._groups_of(top)]

    def _agreed(self, top: str, stored: Mapping[str, dict[str, Any]], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options stored for a group's parameters. Raises NotRestorable if they differ or are missing."""
        full_names = filter(None, (self._names.get(id(parameter)) for parameter in group["params"]))
        names = [name.partition(".")[2] for name in full_names]
        for name in names:
            if name not in stored:
                raise NotRestorable(f"{self._checkpoint.url} has no options of {name}, which {top} trains now")
            if different := describe_difference(stored[names[0]], stored[name]):
                raise NotRestorable(
                    f"{top} has {names[0]} and {name} in one parameter group now, but in {self._checkpoint.url} they "
                    f"differ in {different}: keep them in separate groups"
                )
        return stored[names[0]] if names else {}


_VERSION = "everstep.version"
_BLOB = "everstep.blob"
_PER_RANK_KEY = re.compile(r"everstep\.own\.(\d{1,7})\.(.+)")


def read_checkpoint(
    url: str, objects: Mapping[str, object], state: TrackedState, rank: int, world: int
) -> CheckpointImport:
    """Read the checkpoint at ``url`` into ``state``'s tensors. Raises NotRestorable, DamagedCheckpoint or OSError."""
    started = CheckpointImport(open_checkpoint(url), objects, state, rank)
    try:
        started.read(world)
    except Exception:
        started.undo()
        raise
    return started


def _by_key(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


class CheckpointImport:
    """A checkpoint being read into a rank's objects: tensors by ``read``, all else by ``finish``."""

    def __init__(self, reader: CheckpointReader, objects: Mapping[str, object], state: TrackedState, rank: int) -> None:
        self._checkpoint = reader
        self._state, self._rank = state, rank
        tracked = TrackedObjects(objects)
        self._others = tracked.others
        self._arrays = frozenset(key for key, _ in tracked.arrays)
        modules, optimizers = _by_key(tracked.modules), _by_key(tracked.optimizers)
        modules |= {key: [] for key in self._arrays}  # their tensors are found by names alike
        self._keys = CheckpointKeys(reader)
        self._tops = frozenset(modules)
        self._sharded = frozenset(key for key, other in tracked.others.items() if isinstance(other, ShardedState))
        self._modules = StoredModules(reader, self._keys, modules)
        self._optimizers = StoredOptimizers(reader, self._keys, optimizers)
        self._step = 0
        self._deferred_loads: list[Callable[[], object]] = []
        self._rows: dict[str, list[int]] = defaultdict(list)
        for key in reader.paths:
            if (own := _PER_RANK_KEY.fullmatch(key)) is not None:
                self._rows[own[2]].append(int(own[1]))
        self._backup = StateBackup(state, with_values=False)

    def read(self, world: int) -> None:
        self._fill_tensors(world)
        if _VERSION in self._checkpoint.tensors:
            self._read_blob()
        else:
            self._read_objects()

    def finish(self) -> int:
        """Load everything but tensors into the objects; return the checkpoint's step, 0 if it has none."""
        for put in self._deferred_loads:
            put()
        self._checkpoint.close()
        self._state.record_buffers()
        log.info("started from %s at step %d", self._checkpoint.url, self._step)
        return self._step

    def undo(self) -> None:
        """Remove optimizer state that was made for this checkpoint: another one may have none."""
        self._checkpoint.close()
        self._backup.undo()

    def _fill_tensors(self, world: int) -> None:
        """Fill parameters, buffers and moments."""
        live = self._state.tensors()
        parts = {p.name: p for p in self._state.layout(live, self._rank, world).parts}
        mine = [p for p in parts.values() if p.name.partition(".")[0] in self._tops]
        keys = self._modules.map_keys(mine)
        tied_there = self._tied_there(keys)
        catalog = [self._as_stored(part, keys[part.name], tied_there.get(part.name, ())) for part in mine]
        tied = {self._checkpoint.storage_identity(keys[t.name]): n for n, t in enumerate(catalog) if not t.per_rank}
        names = {id(t.container[t.key]): t.name for t in live if t.is_parameter}
        for moment in self._optimizers.moments(names, tied_there):
            if moment.keys[0] not in self._checkpoint.tensors or len(moment.keys) > 1:
                value = to_live(moment.optimizer, moment.parameter, self._optimizers.read_value(moment))
                moment.optimizer.state[moment.parameter][moment.name] = value
                continue
            keys[moment.full_name] = key = moment.keys[0]
            dtype, shape = self._checkpoint.tensors[key]
            tensor = TensorInfo(moment.full_name, dtype_name(dtype), dtype.itemsize, shape, False)
            first = tied.setdefault(self._checkpoint.storage_identity(key), len(catalog))
            if first < len(catalog) and catalog[first].dtype == tensor.dtype:
                known = catalog[first]
                catalog[first] = msgspec.structs.replace(known, aliases=(*known.aliases, moment.full_name))
            else:
                catalog.append(tensor)
        for key, (dtype, shape) in self._checkpoint.tensors.items():
            if key.partition(".")[0] in self._sharded:  # only Everstep's own checkpoints have them
                keys[key] = key
                catalog.append(TensorInfo(key, dtype_name(dtype), dtype.itemsize, shape, False))
        for index, target in self._state.restore_targets(tuple(catalog)):
            self._fill(target, catalog[index], keys[catalog[index].name])

    def _tied_there(self, keys: Mapping[str, str]) -> Aliases:
        """Return other names that a vault stored a live tensor under; its optimizer state is under one of them."""
        if _VERSION not in self._checkpoint.tensors:
            return {}
        places: dict[object, list[str]] = defaultdict(list)
        for key in self._checkpoint.tensors:
            if key.partition(".")[0] in self._tops:
                places[self._checkpoint.storage_identity(key)].append(key)
        tied = {name: places[self._checkpoint.storage_identity(key)] for name, key in keys.items()}
        return {name: tuple(key for key in all_ if key != name) for name, all_ in tied.items() if len(all_) > 1}

    def _as_stored(self, part: TensorPart, key: str, aliases: tuple[str, ...] = ()) -> TensorInfo:
        """Return a catalog entry that fits the live tensor; torch converts dtypes while it copies."""
        shape = part.shape[1:] if part.sharing is Sharing.PER_RANK else part.shape
        stored = self._checkpoint.tensors
        if (there := stored[key][1]) != shape:
            raise NotRestorable(f"{part.name} is {list(shape)} now, but {list(there)} in {self._checkpoint.url}")
        rows = sorted(self._rows.get(part.name, ()))
        if not rows:
            return TensorInfo(part.name, part.dtype, part.itemsize, shape, False, aliases)
        return TensorInfo(part.name, part.dtype, part.itemsize, (rows[-1] + 1, *shape), True, ranks=tuple(rows))

    def _fill(self, target: TrackedTensor, tensor: TensorInfo, key: str) -> None:
        """Fill a target; a per-rank buffer gets the values of the rank that this one continues."""
        if tensor.per_rank:
            key = f"everstep.own.{tensor.source_rank(self._rank)}.{tensor.name}"
        if not target.box.volume:
            return
        with torch.no_grad():
            for box, value in self._checkpoint.read(key, target.box):
                view_of_box(target.local, target.box, box).copy_(value)

    def _read_blob(self) -> None:
        """Read the Python state of Everstep's own checkpoint: this rank's first, missing names from others."""
        ranks = [int(k.rpartition(".")[2]) for k in self._checkpoint.tensors if k.startswith(f"{_BLOB}.")]
        names, states = self._state.python_names(), list[PythonState]()
        for rank in sorted(ranks, key=lambda rank: (rank != self._rank, rank)):
            states.append(decode(as_bytes(self._checkpoint.read_value(f"{_BLOB}.{rank}"))))
            if not names.difference(*(state.names for state in states)):
                break
        merged = MergedState(states, names)
        self._state.require_python(merged)
        self._deferred_loads.append(partial(self._state.load_python, merged))
        _, self._step = self._checkpoint.read_value(_VERSION).tolist()

    def _read_objects(self) -> None:
        """Read modules' extra state, hyper-parameters, and the state of all other objects."""
        loads = self._deferred_loads
        loads += [partial(module.set_extra_state, value) for module, value in self._modules.extra_states()]
        loads += [partial(group.update, options) for group, options in self._optimizers.group_options()]
        loads.append(self._state.adopt_arrays)
        for key, tracked in self._others.items():
            if key in self._arrays:
                if tracked.state_dict():
                    log.warning("%s has only arrays of %s: its other values stay initial", self._checkpoint.url, key)
                continue
            stored = (self._keys.read_under(prefix.rstrip(".")) for prefix in candidate_prefixes(key, None))
            state = next((state for state in stored if state is not None), None)
            if state is not None:
                loads.append(partial(tracked.load_state_dict, state))
            else:
                log.warning("%s has no state of %s: it keeps its initial state", self._checkpoint.url, key)
