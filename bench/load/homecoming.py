"""Agents' search for the controller after a dead one, with the time of each first answer."""

from __future__ import annotations

import random
import re
from array import array

_PAUSE = re.compile(r'"retry_after_s":([0-9.]+)')
LONGEST_PAUSE_S = 1.0
"""What a controller may ask of an agent with a job on its node (``everstep_agent.uplink.connection``)."""
FIRST_PAUSES_S = (0.02, 0.2)
"""Where the refusal names none: drawn from between, as the agent's back-off does."""


class Homecoming:
    """The addresses of the controllers, and which of them this crowd's agents are at.

    An agent whose session ends goes to the next address at once, and stays with that one: it asks again when a refusal
    says, as a real agent does, which also looks whether the dead one is back (a host of its own answers that).

    Attributes:
        answered: when each agent that had lost its controller was answered by another; wall seconds.
    """

    def __init__(self, addresses: list[str], seed: int) -> None:
        self._homes = [_pair(address) for address in addresses]
        self._random = random.Random(seed)
        self.answered = array("d")

    @property
    def elsewhere(self) -> bool:
        """Whether there is another controller to go to."""
        return len(self._homes) > 1

    def address(self, home: int) -> tuple[str, int]:
        return self._homes[home % len(self._homes)]

    def pause_s(self, refusal: str) -> float:
        """Seconds until an agent that was refused in these words asks again."""
        found = _PAUSE.search(refusal)
        asked_s = min(LONGEST_PAUSE_S, float(found.group(1))) if found else 0.0
        return max(asked_s, self._random.uniform(*FIRST_PAUSES_S))


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
