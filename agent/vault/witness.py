"""Peers that are gone: told to the supervisor when a connection broke and the peer's vault takes no other.

A connection ends for many reasons (a job that is over, a copy that was given up), so each break is looked at again
before a word is said. Both sides of a connection notice, the one that copies and the one that is copied to.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable

from agent.vault.jobs import JobBook
from everstep.clock import Clock
from everstep.errors import NotFound
from everstep.ids import split_address
from everstep.wire.v1.training import PeerLost

log = logging.getLogger(__name__)

ONE_LOOK_IN_S = 1.0
"""Of breaks with one peer (each rank has connections of its own) the first in a second is looked at."""

LOOKS_AFTER_S = (0.0, 0.05)
"""Pauses before each look: a process that is being killed may still take a connection at first."""

CONNECT_TIMEOUT_S = 0.3
"""A machine on the same network takes a connection within milliseconds; one that is gone does not answer."""


class Witness:
    """Safe to use from any thread. ``tell`` is called from a thread of its own."""

    def __init__(self, node: str, book: JobBook, clock: Clock, tell: Callable[[PeerLost], None]) -> None:
        self._node = node
        self._book = book
        self._clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._looked_at: dict[str, float] = {}
        self._closed = False

    def broke(self, job: str, peer: str, why: str) -> None:
        """A proved connection of ``job`` with ``peer`` ended without our doing."""
        now = self._clock.monotonic()
        with self._lock:
            if self._closed or now < self._looked_at.get(peer, -ONE_LOOK_IN_S) + ONE_LOOK_IN_S:
                return
            self._looked_at[peer] = now
        threading.Thread(target=self._look, args=(job, peer, why), name="witness", daemon=True).start()

    def close(self) -> None:
        """No word after this: the connections end because we do."""
        with self._lock:
            self._closed = True

    def _look(self, job: str, peer: str, why: str) -> None:
        try:
            address = split_address(self._book.facts(job).address(peer))
        except NotFound:
            return  # the job is over, or has nothing there any more
        for pause_s in LOOKS_AFTER_S:
            time.sleep(pause_s)
            refusal = _refusal(address)
            if refusal:
                self._say(job, peer, f"{why}; then: {refusal}")
                return

    def _say(self, job: str, peer: str, detail: str) -> None:
        with self._lock:
            if self._closed:
                return
        lost = PeerLost(job=job, at=self._clock.wall(), trace=uuid.uuid4().hex[:16], peer=peer, detail=detail[:1000])
        context = {"node": self._node, "job": job, "trace": lost.trace}
        log.warning("the vault of %s is out of reach: %s", peer, detail, extra=context)
        self._tell(lost)


def _refusal(address: tuple[str, int]) -> str:
    """Why no connection is taken there, empty where one is."""
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""
