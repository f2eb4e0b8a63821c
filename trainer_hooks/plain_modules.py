"""Modules in an ordinary checkpoint: under which keys one has what its tensors are called now.

One rule of names serves all tensors of a tracked module, so that none is taken for another that is called alike:
``model.norm.weight`` may be the norm of what was saved under ``model``, or that of a part that is called so.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from everstep.errors import NotRestorable
from trainer_hooks.module_names import named_modules
from trainer_hooks.plain_files import Checkpoint
from trainer_hooks.plain_keys import Keys, prefixes
from trainer_hooks.snapshot.layout import Part

log = logging.getLogger(__name__)


class Rule(msgspec.Struct, frozen=True):
    """How a name within a tracked module becomes a key: what comes off its front, and what stands there instead."""

    prefix: str
    off: str = ""

    def key(self, name: str) -> str:
        """``name`` begins with the key under which the module is tracked."""
        return self.prefix + name.partition(".")[2].removeprefix(self.off)


class StoredModules:
    """What a checkpoint has of the modules that are tracked, by the keys under which these are."""

    def __init__(self, checkpoint: Checkpoint, keys: Keys, modules: Mapping[str, Sequence[torch.nn.Module]]) -> None:
        self._checkpoint = checkpoint
        self._keys = keys
        self._modules = modules
        self._rules: dict[str, Rule] = {}

    def keys_of(self, parts: Iterable[Part]) -> dict[str, str]:
        """Where each tensor of the modules is. Raises NotRestorable naming what is nowhere."""
        of: dict[str, list[Part]] = defaultdict(list)
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
                f"{self._checkpoint.url} has not all that is tracked: {len(missing)} of {len(keys) + len(missing)} "
                f"tensors of modules are not in it ({', '.join(missing[:3])}); it has {len(stored)} tensors "
                f"({', '.join(sorted(stored)[:3])}). Track the module under the key it was saved under, and tie what "
                "was tied: that is stored under one of its names"
            )
        return keys

    def extra(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        """Modules' extra state, as far as there is some."""
        for top, roots in self._modules.items():
            for name, module in (found for root in roots for found in named_modules(top, root)):
                if type(module).get_extra_state is torch.nn.Module.get_extra_state:
                    continue
                rules = [self._rules[top]] if top in self._rules else self._possible(top)
                found = [value for rule in rules if (value := self._extra(f"{name}._extra_state", rule)) is not None]
                if found:
                    yield module, found[0]
                else:
                    log.warning("%s has no %s._extra_state: it starts as it was made", self._checkpoint.url, name)

    def _extra(self, name: str, rule: Rule) -> Any:
        key = self._keys.at(rule.key(name))
        return self._checkpoint.value(key) if key in self._checkpoint.paths else self._keys.under(rule.key(name))

    def _found(self, parts: Sequence[Part], rule: Rule) -> Iterator[tuple[str, str]]:
        for part in parts:
            places = (self._keys.at(rule.key(name)) for name in (part.name, *part.aliases))
            key = next((place for place in places if place in self._checkpoint.tensors), None)
            if key is not None:
                yield part.name, key

    def _possible(self, top: str) -> Iterator[Rule]:
        """Those under which the checkpoint has something by itself, and then those that only look so; then with the
        name that transformers' models give to what is below a head, or without it."""
        usual = ("model", "state_dict") if len(self._modules) == 1 else None
        whole = self._keys.whole
        for prefix in sorted(prefixes(top, usual), key=lambda prefix: prefix not in whole):
            yield Rule(prefix)
            yield Rule(f"{prefix}module.")
        for base in {_base(root) for root in self._modules[top]} - {""} if usual else ():
            yield Rule(f"{base}.")
            yield Rule("", off=f"{base}.")


def _base(root: torch.nn.Module) -> str:
    names = (getattr(module, "base_model_prefix", "") for module in root.modules())
    return next((name for name in names if name and isinstance(name, str)), "")
