"""Mutants: deliberate mistakes in the code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Patch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """A deliberate mistake.

    Attributes:
        name: What the mistaken code does.
        apply: Returns a context manager that puts the mistake into the code.
        seeds: Worlds in which a checker has detected it before.
    """

    name: str
    apply: Patch
    seeds: tuple[int, ...] = ()


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function."""


def return_false(*_: Any, **__: Any) -> bool:
    """Return False, in place of a check."""
    return False


def return_empty(*_: Any, **__: Any) -> str:
    """Return no reason, in place of a function that returns one."""
    return ""
