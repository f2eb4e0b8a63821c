"""One deliberate mistake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Surgery = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """``name`` says what is wrong; ``apply`` makes it so for as long as its context lasts."""

    name: str
    apply: Surgery
    seeds: tuple[int, ...] = ()


def nothing(*_: Any, **__: Any) -> None:
    """In place of what should be done."""
