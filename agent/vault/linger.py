"""How long a vault stays where nobody is connected to it, and what the kernel may do to it when memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.vault_note import VaultNote

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between looks: a small part of any linger that makes sense."""

OOM_SCORE_ADJUSTMENT = -800
"""Far behind every rank, and not exempt: a kernel that may end nobody at all would have to panic."""


class Linger:
    """Notices when nobody is connected to a vault any more, and for how long.

    Args:
        clients: everybody who is connected now: supervisors and ranks.
        linger_s: how long it stays without any; None: until it is told to end.
        note: what it says of itself; ``write`` makes it known.
    """

    def __init__(
        self,
        clients: Collection[object],
        linger_s: float | None,
        clock: Clock,
        note: VaultNote,
        write: Callable[[VaultNote], None],
    ) -> None:
        self._clients = clients
        self._linger_s = linger_s
        self._clock = clock
        self._note = note
        self._write = write

    async def watch(self) -> None:
        """Returns once nobody was there for ``linger_s``."""
        alone_since: float | None = self._begins_alone()
        while self._linger_s is None or alone_since is None or self._clock.monotonic() - alone_since < self._linger_s:
            await asyncio.sleep(LOOK_S if self._linger_s is None else min(LOOK_S, self._linger_s / 4))
            if self._clients:
                if alone_since is not None:
                    self._say(self._note)
                alone_since = None
            elif alone_since is None:
                alone_since = self._begins_alone()
        log.warning("nobody came for %g s: ending, and freeing all slots", self._linger_s)

    def _begins_alone(self) -> float:
        now = self._clock.wall()
        ends_at = None if self._linger_s is None else now + self._linger_s
        self._say(msgspec.structs.replace(self._note, alone_since=now, ends_at=ends_at))
        return self._clock.monotonic()

    def _say(self, note: VaultNote) -> None:
        try:
            self._write(note)
        except OSError as error:  # a full memory file system: the slots matter, the note does not
            log.warning("what this vault says of itself could not be written: %s", error)


def keep_from_oom_killer() -> bool:
    """Asks the kernel to end ranks, which are replaced, before this process. False where it may not ask.

    Ranks step forward themselves (``trainer_hooks.launch.process``), which needs nobody's leave.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT))
    except PermissionError:
        return False
    return True
