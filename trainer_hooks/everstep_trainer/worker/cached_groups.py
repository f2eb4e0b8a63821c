"""Name process groups of an earlier generation that the script still holds.

A regroup destroys all groups. One that a script keeps in a global variable or on a class fails at its first use, or is
used by the surviving ranks while a replacement makes a new one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from everstep_trainer.runtime.activity import is_script_file

MAX_OBJECTS = 5_000
"""Objects looked at, over all variables: a few milliseconds, once in the life of a process."""
MAX_ELEMENTS = 1_000
"""Longest container that is looked into; longer ones hold data."""
_OPAQUE = (str, bytes, int, float, torch.Tensor, torch.Generator, type(None))


def script_modules() -> Iterator[ModuleType]:
    """Yield the loaded modules that are the user's own.

    Two thousand modules are loaded: a library is recognized by its top package.
    """
    libraries: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in libraries:
            file = _file_of(sys.modules.get(top))
            libraries[top] = top in sys.stdlib_module_names or (file is not None and not _is_own(file))
        file = _file_of(module)
        if not libraries[top] and file is not None and _is_own(file):
            yield module


def _file_of(module: object) -> str | None:
    """Return a module's file; not by ``getattr``, at which lazy modules import what they stand for."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _is_own(file: str) -> bool:
    return is_script_file(file) and os.path.exists(file)


def cached_groups(modules: Iterable[ModuleType]) -> list[str]:
    """Return the variables of ``modules`` that hold a process group or a device mesh, such as ``train.py: GROUP``.

    Call it when no group of the new generation can be among them.
    """
    seen: set[int] = set()
    found = []
    for module in modules:
        file = os.path.basename(str(module.__file__))
        for name, value in list(vars(module).items()):
            if not name.startswith("__") and _holds_group(value, module, seen):
                found.append(f"{file}: {name}")
    return found


def _holds_group(value: object, module: ModuleType, seen: set[int]) -> bool:
    """Return whether a group can be reached from a variable of ``module``, without entering other modules."""
    queue = deque([value])
    while queue and len(seen) < MAX_OBJECTS:
        one = queue.popleft()
        if isinstance(one, dist.ProcessGroup | DeviceMesh):
            return True
        if id(one) in seen or isinstance(one, (*_OPAQUE, ModuleType)):
            continue
        seen.add(id(one))
        queue.extend(_parts(one, module))
    return False


def _parts(one: object, module: ModuleType) -> Iterable[object]:
    """Return what ``one`` holds: elements, attributes, a closure's cells, or what ``functools.cache`` has kept."""
    if isinstance(one, dict | list | tuple | set | frozenset) and len(one) > MAX_ELEMENTS:
        return ()
    if isinstance(one, type):
        return vars(one).values() if one.__module__ == module.__name__ else ()
    if isinstance(one, FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        return [*cells, *(one.__defaults__ or ()), *vars(one).values()]
    return [part for part in gc.get_referents(one) if part is not type(one)]


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined] # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
