"""Change functions in memory for a while, in every module that refers to them."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

PACKAGES = ("everstep_controller.", "everstep_agent.", "everstep_trainer.", "tests.sim.")
"""Prefixes of the modules that may refer to a changed function."""


def _modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES) and module is not None]


@contextmanager
def replaced_function(old: Any, new: Any) -> Iterator[None]:
    """Replace the function ``old`` by ``new``, under every name and in every dictionary of the project's modules."""
    undo: list[Callable[[], None]] = []
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
                undo.append(functools.partial(setattr, module, name, old))
            elif isinstance(value, dict) and not name.startswith("__"):
                for key in [key for key, entry in list(value.items()) if entry is old]:
                    value[key] = new
                    undo.append(functools.partial(value.__setitem__, key, old))
    assert undo, f"no module refers to {old}"
    try:
        yield
    finally:
        for restore in undo:
            restore()


@contextmanager
def replaced_method(owner: type, name: str, new: Any) -> Iterator[None]:
    """Replace a method by ``new``."""
    old = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def edited_copy(function: Any, before: str, after: str) -> Any:
    """Return a copy of ``function`` with ``before`` replaced by ``after`` in its source, where it must occur once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(before) == 1, f"{function.__qualname__} has {before!r} {source.count(before)} times"
    code = compile(f"from __future__ import annotations\n{source.replace(before, after)}", function.__module__, "exec")
    names = sys.modules[function.__module__].__dict__
    scope: dict[str, Any] = {}
    exec(code, names, scope)
    return scope[function.__name__]


@contextmanager
def edited_function(function: Any, before: str, after: str) -> Iterator[None]:
    """Replace a function in every module by a copy with ``before`` replaced by ``after``."""
    with replaced_function(function, edited_copy(function, before, after)):
        yield


@contextmanager
def edited_method(owner: type, name: str, before: str, after: str) -> Iterator[None]:
    """Replace a method by a copy with ``before`` replaced by ``after``."""
    with replaced_method(owner, name, edited_copy(owner.__dict__[name], before, after)):
        yield
