"""How a mistake gets into the code: in memory, for a moment, in every place that has hold of what is changed."""

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


def _modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES) and module is not None]


@contextmanager
def swapped(old: Any, new: Any) -> Iterator[None]:
    """``new`` in place of the function ``old``, under every name and in every table of the project's modules."""
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
    assert undo, f"{old} is nowhere to be replaced"
    try:
        yield
    finally:
        for restore in undo:
            restore()


@contextmanager
def method_swapped(owner: type, name: str, new: Any) -> Iterator[None]:
    """``new`` in place of a method."""
    old = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def rewritten(function: Any, before: str, after: str) -> Any:
    """A copy of ``function`` whose source has ``after`` where it had ``before``, which must be there exactly once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(before) == 1, f"{function.__qualname__} has {before!r} {source.count(before)} times"
    code = compile(f"from __future__ import annotations\n{source.replace(before, after)}", function.__module__, "exec")
    names = sys.modules[function.__module__].__dict__
    scope: dict[str, Any] = {}
    exec(code, names, scope)
    return scope[function.__name__]


@contextmanager
def mistaken(function: Any, before: str, after: str) -> Iterator[None]:
    """The function with that one change, everywhere."""
    with swapped(function, rewritten(function, before, after)):
        yield


@contextmanager
def method_mistaken(owner: type, name: str, before: str, after: str) -> Iterator[None]:
    """The same for a method."""
    with method_swapped(owner, name, rewritten(owner.__dict__[name], before, after)):
        yield
