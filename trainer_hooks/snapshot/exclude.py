"""Tensors that a user does not want stored, by patterns on their full names: of frozen parts, of caches that refill."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

NEAR = 5
LITTLE_ALIKE = 0.4
"""difflib's measure from which on a name is worth showing."""


class Exclusions:
    """Patterns as of fnmatch: ``model.teacher.*``, ``optimizer.model.head.*``.

    A pattern may be of optimizer state, which is there after the first step only: so ``require_used`` is asked again.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._unused = dict.fromkeys(patterns)
        self._patterns = tuple(self._unused)

    def covers(self, name: str) -> bool:
        """Whether the tensor of this name is left out."""
        for pattern in self._patterns:
            if fnmatchcase(name, pattern):
                self._unused.pop(pattern, None)
                return True
        return False

    def require_used(self, names: Collection[str], to_come: Collection[str]) -> None:
        """Raises ValueError, with the names that are near, for a pattern that left nothing out and will not.

        ``to_come``: keys of optimizers of which not all state is there.
        """
        for pattern in self._unused:
            literal = pattern.partition("*")[0].partition("?")[0].partition("[")[0]
            if not any(f"{key}.".startswith(literal) or literal.startswith(f"{key}.") for key in to_come):
                near = get_close_matches(pattern, names, NEAR, LITTLE_ALIKE) or sorted(names)[:NEAR]
                raise ValueError(
                    f"exclude={pattern!r} matches none of {len(names)} tracked tensors; near it are {', '.join(near)}"
                )

    def require_whole(self, name: str, keys: Collection[str]) -> None:
        """Raises ValueError where a part of a parameter's optimizer state is left out: an optimizer that finds some of
        it after a restore takes the rest for there."""
        out = [key for key in keys if self._patterns and self.covers(f"{name}.{key}")]
        if out and len(out) < len(keys):
            raise ValueError(
                f"exclude leaves {', '.join(out)} of {name} out, and not the rest: exclude '{name}.*', or nothing of it"
            )
