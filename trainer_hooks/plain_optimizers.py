"""Optimizers in an ordinary checkpoint: by parameters' names, as get_optimizer_state_dict has them, or by numbers, as
``state_dict()`` has; nested, or flattened by name, as torchtitan saves."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from everstep.errors import NotRestorable
from trainer_hooks.plain_files import Checkpoint
from trainer_hooks.plain_keys import Keys, joined, nested, plain, prefixes
from trainer_hooks.python_state import difference
from trainer_hooks.ties import Aliases

log = logging.getLogger(__name__)


class Moment(msgspec.Struct, frozen=True):
    """A part of a parameter's state: its name there, and the keys under which it is stored: several where it is nested
    in lists or dictionaries, one behind another."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    full: str
    """Its full name, as a tensor's."""
    name: str
    keys: tuple[str, ...]


class StoredOptimizers:
    """What a checkpoint has of the optimizers that are tracked, by the keys under which these are."""

    def __init__(
        self, checkpoint: Checkpoint, keys: Keys, optimizers: Mapping[str, list[torch.optim.Optimizer]]
    ) -> None:
        self._checkpoint = checkpoint
        self._keys = keys
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        self._prefixes: dict[str, str | None] = {}
        self._within: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """By the key of a parameter's state, by the name in it."""
        self._depth: dict[str, int] = {}
        for key, path in checkpoint.paths.items():
            above, _, name = plain(key).rpartition(".")
            at = next((n + 2 for n, part in enumerate(path[:-3]) if part == "state"), 0)
            if at:
                above, name = joined(path[:at]), str(path[at])
                self._depth[key] = at + 1
            self._within[above][name].append(key)

    def moments(self, names: dict[int, str], aliases: Aliases) -> Iterator[Moment]:
        """What there is of the state of parameters, whose full names are given by identity.

        ``aliases``: other names under which their state may be.
        """
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
                            yield Moment(optimizer, parameter, f"{top}.{name}.{part}", part, tuple(keys))
                        if found:
                            break

    def value(self, moment: Moment) -> Any:
        """Of one that is no tensor, or has tensors in it."""
        found = {self._checkpoint.paths[key][self._depth.get(key, 0) :]: key for key in moment.keys}
        if len(found) == 1 and moment.keys[0] not in self._depth:
            return self._checkpoint.value(moment.keys[0])
        return nested({path: self._checkpoint.value(key) for path, key in found.items()})

    def options(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each parameter group with the hyper-parameters that are stored for it. After ``moments``. Raises
        NotRestorable where groups are others than were stored."""
        for top in self._optimizers:
            if (prefix := self._prefix(top)) is None:
                continue
            groups, live = self._keys.under(f"{prefix}.param_groups"), self._groups_of(top)
            if not isinstance(groups, list):
                groups = self._by_name(top, prefix)
            if len(groups) != len(live):
                now, then = len(live), len(groups)
                raise NotRestorable(f"{top} has {now} parameter groups now, and {then} in {self._checkpoint.url}")
            for group, stored in zip(live, groups, strict=True):
                yield group, {key: value for key, value in stored.items() if key != "params"}

    def _prefix(self, top: str) -> str | None:
        """The key under which an optimizer's state is, or None where it is not in the checkpoint."""
        if top not in self._prefixes:
            usual = ("optimizer", "optim") if len(self._optimizers) == 1 else ()
            candidates = [prefix.rstrip(".") for prefix in prefixes(top, usual) if prefix]
            paths = self._checkpoint.paths
            found = (p for p in candidates if any(key.startswith(f"{p}.param_groups.") for key in paths))
            self._prefixes[top] = next(found, None)
            if self._prefixes[top] is None:
                log.warning("%s has no state of %s: it starts as it was made", self._checkpoint.url, top)
        return self._prefixes[top]

    def _groups_of(self, top: str) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers[top] for group in optimizer.param_groups]

    def _by_name(self, top: str, prefix: str) -> list[dict[str, Any]]:
        """The options of each live group, where they are stored for each parameter by its name
        (``flatten_optimizer_state_dict``, as torchtitan has it)."""
        stored: dict[str, dict[str, Any]] = defaultdict(dict)
        begin = f"{prefix}.param_groups."
        for key in self._checkpoint.paths:
            if key.startswith(begin):
                name, _, option = plain(key.removeprefix(begin)).rpartition(".")
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
