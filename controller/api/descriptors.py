"""How many connections this process holds, against how many file descriptors it may have."""

from __future__ import annotations

import resource
from functools import cache

RESERVED = 256
"""File descriptors kept for everything that is no agent's connection: the database, logs, libraries, operators."""
SCARCE_SHARE = 0.75
"""Of the descriptors, from which on agents whose nodes no job waits for hang up between beats."""
EXHAUSTED_SHARE = 0.85
"""From which on all agents do: better that directives come with the next beat than that an agent is refused. Of a fleet
of a million GPUs that beats every 20 s, thousands of connections are on their way in a bad half second."""


class Descriptors:
    """Counts connections.

    Args:
        limit: connections that may be open at once; further ones are closed on arrival.
    """

    __slots__ = ("exhausted_from", "limit", "open", "scarce_from")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.scarce_from = round(limit * SCARCE_SHARE)
        self.exhausted_from = round(limit * EXHAUSTED_SHARE)

    @property
    def scarce(self) -> bool:
        return self.open >= self.scarce_from

    @property
    def exhausted(self) -> bool:
        return self.open >= self.exhausted_from

    @property
    def spent(self) -> bool:
        """Whether no further connection may be taken."""
        return self.open > self.limit


@cache
def of_this_process() -> Descriptors:
    """The process's own: as many as its limit leaves, when this is first asked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Descriptors(max(soft - RESERVED, soft // 2))
