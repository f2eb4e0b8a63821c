"""Which protocol versions this build speaks, and how two sides agree on one."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.errors import VersionMismatch

SPOKEN: tuple[int, ...] = (1,)
VAULTS_SPEAK: tuple[int, ...] = (2,)
"""Among themselves. In version 1 a slot's manifest was part of the frame that offered it."""
MOST_SHOWN = 8
"""Of offered versions, in a refusal."""


def negotiate(offered: Iterable[int], spoken: Iterable[int] = SPOKEN) -> int:
    """The newest version in both. Raises VersionMismatch, saying which side is older, where there is none."""
    theirs, ours = set(offered), set(spoken)
    both = theirs & ours
    if both:
        return max(both)
    older = "the caller" if theirs and max(theirs) < min(ours) else "this side"
    raise VersionMismatch(
        f"no protocol version in common: offered {_newest(theirs)}, spoken here {_newest(ours)}; upgrade {older}"
    )


def _newest(versions: set[int]) -> str:
    """The newest few, in words: a stranger may offer thousands."""
    shown = sorted(versions)[-MOST_SHOWN:]
    return f"{shown}" if len(shown) == len(versions) else f"{shown} and {len(versions) - len(shown)} older"
