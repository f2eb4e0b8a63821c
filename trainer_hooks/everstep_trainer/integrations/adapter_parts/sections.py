"""Name the work of a framework for which other ranks may wait: it may wait for storage or the network for long."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from everstep_trainer.run import Run


def work_alone(run: Run, owner: Any, **names: str) -> None:
    """Run methods of an object inside ``run.alone``, so that a rank in them is not taken for hung.

    Args:
        run: The run of the training function.
        owner: The object; its methods are replaced on it alone, where it has them.
        names: The name of the section by the method's name.
    """
    for method, name in names.items():
        if callable(function := getattr(owner, method, None)):
            setattr(owner, method, _inside(run, name, function))


def _inside(run: Run, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inside(*arguments: Any, **options: Any) -> Any:
        with run.alone(name):
            return function(*arguments, **options)

    return inside
