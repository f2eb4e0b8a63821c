"""A job that starts from an ordinary checkpoint: each rank reads what it needs of it into what is tracked.

Of Everstep's own checkpoints all comes back, the step too. Of others the tensors of modules must all be there; an
optimizer or another object that is not stays as it was made, which is said in the log. Steps then begin at 1.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch

from everstep.errors import NotRestorable
from trainer_hooks.nested_state import to_live
from trainer_hooks.plain_files import Checkpoint, open_checkpoint
from trainer_hooks.plain_keys import Keys, prefixes
from trainer_hooks.plain_modules import StoredModules
from trainer_hooks.plain_optimizers import StoredOptimizers
from trainer_hooks.python_state import Merged, PythonState, decode
from trainer_hooks.restore.before import Before
from trainer_hooks.snapshot.blob import as_bytes, dtype_name
from trainer_hooks.snapshot.copy import part_of
from trainer_hooks.snapshot.layout import Part, Sharing, Tensor
from trainer_hooks.state import TrackedState, TrackedTensor
from trainer_hooks.ties import Aliases
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
        self._others = tracked.others
        modules: defaultdict[str, list[torch.nn.Module]] = defaultdict(list)
        for key, module in tracked.modules:
            modules[key].append(module)
        optimizers: defaultdict[str, list[torch.optim.Optimizer]] = defaultdict(list)
        for key, optimizer in tracked.optimizers:
            optimizers[key].append(optimizer)
        self._keys = Keys(checkpoint)
        self._tops = frozenset(modules)
        self._modules = StoredModules(checkpoint, self._keys, modules)
        self._optimizers = StoredOptimizers(checkpoint, self._keys, optimizers)
        self._step = 0
        self._puts: list[Callable[[], object]] = []
        self._rows: dict[str, list[int]] = defaultdict(list)
        for key in checkpoint.paths:
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
        mine = [p for p in parts.values() if p.name.partition(".")[0] in self._tops]
        keys = self._modules.keys_of(mine)
        tied_there = self._tied_there(keys)
        catalog = [self._as_stored(part, keys[part.name], tied_there.get(part.name, ())) for part in mine]
        tied = {self._checkpoint.origin(keys[t.name]): n for n, t in enumerate(catalog) if not t.own}
        names = {id(t.place[t.key]): t.name for t in live if t.parameter}
        for moment in self._optimizers.moments(names, tied_there):
            if moment.keys[0] not in self._checkpoint.tensors or len(moment.keys) > 1:
                value = to_live(moment.optimizer, moment.parameter, self._optimizers.value(moment))
                moment.optimizer.state[moment.parameter][moment.name] = value
                continue
            keys[moment.full] = key = moment.keys[0]
            dtype, shape = self._checkpoint.tensors[key]
            tensor = Tensor(moment.full, dtype_name(dtype), dtype.itemsize, shape, False)
            first = tied.setdefault(self._checkpoint.origin(key), len(catalog))
            if first < len(catalog) and catalog[first].dtype == tensor.dtype:
                known = catalog[first]
                catalog[first] = msgspec.structs.replace(known, aliases=(*known.aliases, moment.full))
            else:
                catalog.append(tensor)
        for index, target in self._state.targets(tuple(catalog)):
            self._fill(target, catalog[index], keys[catalog[index].name])

    def _tied_there(self, keys: Mapping[str, str]) -> Aliases:
        """Other names that a vault wrote a live tensor under: its state in an optimizer is under one of these."""
        if _VERSION not in self._checkpoint.tensors:
            return {}
        places: dict[object, list[str]] = defaultdict(list)
        for key in self._checkpoint.tensors:
            if key.partition(".")[0] in self._tops:
                places[self._checkpoint.origin(key)].append(key)
        alike = {name: tuple(places[self._checkpoint.origin(key)]) for name, key in keys.items()}
        return {name: tuple(key for key in all_ if key != name) for name, all_ in alike.items() if len(all_) > 1}

    def _as_stored(self, part: Part, key: str, aliases: tuple[str, ...] = ()) -> Tensor:
        """A catalog entry that the live tensor fits; torch converts between dtypes while it copies."""
        shape = part.shape[1:] if part.sharing is Sharing.OWN else part.shape
        stored = self._checkpoint.tensors
        if stored[key][1] != shape:
            raise NotRestorable(
                f"{part.name} is {list(shape)} now, and {list(stored[key][1])} in {self._checkpoint.url}"
            )
        rows = sorted(self._rows.get(part.name, ()))
        if not rows:
            return Tensor(part.name, part.dtype, part.itemsize, shape, False, aliases)
        return Tensor(part.name, part.dtype, part.itemsize, (rows[-1] + 1, *shape), True, ranks=tuple(rows))

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

    def _read_objects(self) -> None:
        """Hyper-parameters, modules' extra state, and the state of objects that are neither modules nor optimizers."""
        self._puts += [partial(module.set_extra_state, value) for module, value in self._modules.extra()]
        self._puts += [partial(group.update, options) for group, options in self._optimizers.options()]
        for key, tracked in self._others.items():
            found = [f for p in prefixes(key, None) if (f := self._keys.under(p.rstrip("."))) is not None]
            if found:
                self._puts.append(partial(tracked.load_state_dict, found[0]))
            else:
                log.warning("%s has no state of %s: it starts as it was made", self._checkpoint.url, key)
