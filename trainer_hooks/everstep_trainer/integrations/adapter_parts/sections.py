"""Name the work of a framework for which other ranks may wait: it may wait for storage or the network for long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any
from weakref import ref

from everstep_trainer.run import Run

_PLAIN = "everstep_plain"  # attribute of a replaced method: the method without a section


def work_alone(run: Run, owner: Any, /, **names: str) -> None:
    """Run methods of an object inside ``run.alone``, so that a rank in them is not taken for hung.

    Args:
        run: The run of the training function.
        owner: The object; its methods are replaced on it alone, where it has them. A later call for the same object,
            such as one of the next generation, replaces them anew.
        names: The name of the section by the method's name.
    """
    for method, name in names.items():
        if callable(function := getattr(owner, method, None)):
            setattr(owner, method, _inside(run, name, getattr(function, _PLAIN, function)))


def _inside(run: Run, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    reference = ref(run)  # the object may live on after the run, whose tracked state would stay in memory

    @wraps(function)
    def inside(*arguments: Any, **options: Any) -> Any:
        current = reference()
        with nullcontext() if current is None else current.alone(name):
            return function(*arguments, **options)

    setattr(inside, _PLAIN, function)
    return inside
