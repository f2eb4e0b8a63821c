"""Connections to other nodes' vaults: proved once, then kept for the next request."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from agent.vault.handshake import introduce
from agent.vault.jobs import JobBook, JobFacts
from agent.vault.settings import VaultSettings
from agent.vault.witness import Witness
from everstep.backoff import Backoff
from everstep.channel import Channel, connect
from everstep.clock import Clock
from everstep.errors import NotFound, Unavailable

T = TypeVar("T")
Key = tuple[str, str, str, bytes]

_INTRODUCTION = Backoff(floor_s=0.01, ceiling_s=0.1)


class Peers:
    """A pool of connections by job, node and address. Safe to use from any thread."""

    def __init__(self, settings: VaultSettings, book: JobBook, clock: Clock, witness: Witness) -> None:
        self._settings = settings
        self._book = book
        self._clock = clock
        self._witness = witness
        self._lock = threading.Lock()
        self._idle: defaultdict[Key, list[Channel]] = defaultdict(list)
        self._busy: set[Channel] = set()
        self._stopping = threading.Event()

    def call(self, job: str, node: str, action: Callable[[Channel], T], timeout_s: float | None = None) -> T:
        """Runs ``action`` over a connection to ``node``'s vault, a kept one where there is one.

        Actions must bear being run twice: a kept connection that proves to be dead is replaced by a new one.
        ``timeout_s`` bounds each wait of this call instead of the settings' time-outs. Raises NotFound where the node
        is no holder or does not know the job, Unavailable where it does not answer, AuthenticationError, and what
        ``action`` raises.
        """
        facts = self._book.facts(job)
        key = (job, node, facts.address(node), facts.secret)
        kept = self._take(key)
        if kept is not None:
            try:
                return self._use(key, kept, action, timeout_s)
            except Unavailable:
                self._drop(key)
        return self._use(key, self._introduced(facts, node, key, timeout_s), action, timeout_s)

    def lend(self, job: str, node: str) -> Channel:
        """A new connection to ``node``'s vault, for reads alone, for the caller to keep. Raises what ``call`` does."""
        facts = self._book.facts(job)
        key = (job, node, facts.address(node), facts.secret)
        channel = self._introduced(facts, node, key, None, read_only=True)
        with self._lock:
            self._busy.discard(channel)
        return channel

    def broke(self, job: str, node: str, why: str) -> None:
        """One that was lent ended without its new owner's doing."""
        self._witness.broke(job, node, why)

    def _take(self, key: Key) -> Channel | None:
        with self._lock:
            channels = self._idle.get(key)
            if not channels:
                return None
            channel = channels.pop()
            self._busy.add(channel)
            return channel

    def _use(self, key: Key, channel: Channel, action: Callable[[Channel], T], timeout_s: float | None) -> T:
        channel.patience(timeout_s or self._settings.io_timeout_s)
        try:
            result = action(channel)
        except BaseException as error:
            self._discard(channel)
            if isinstance(error, Unavailable):
                self._witness.broke(key[0], key[1], str(error))
            raise
        with self._lock:
            self._busy.discard(channel)
            keep = not self._stopping.is_set()
            if keep:
                self._idle[key].append(channel)
        if not keep:
            channel.close()
        return result

    def _discard(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()

    def _drop(self, key: Key) -> None:
        with self._lock:
            dead = self._idle.pop(key, [])
        for channel in dead:
            channel.close()

    def _introduced(
        self, facts: JobFacts, node: str, key: Key, timeout_s: float | None, *, read_only: bool = False
    ) -> Channel:
        """A proved connection. A node that does not know the job yet is asked again for a while."""
        deadline = self._clock.monotonic() + (
            self._settings.introduction_s if timeout_s is None else min(timeout_s, self._settings.introduction_s)
        )
        attempt = 0
        while True:
            try:
                return self._connect(facts, node, key[2], timeout_s, read_only)
            except NotFound:
                pause_s = _INTRODUCTION.delay_s(attempt, 0.5)
                if self._clock.monotonic() + pause_s > deadline or self._stopping.wait(pause_s):
                    raise
                attempt += 1

    def _connect(self, facts: JobFacts, node: str, address: str, timeout_s: float | None, read_only: bool) -> Channel:
        settings = self._settings
        wait_s = timeout_s or settings.io_timeout_s
        channel = connect(address, node, min(wait_s, settings.connect_timeout_s), settings.io_timeout_s)
        with self._lock:
            self._busy.add(channel)
        try:
            channel.patience(wait_s)
            introduce(channel, facts, settings.node, node, read_only=read_only)
        except BaseException:
            self._discard(channel)
            raise
        return channel

    def configured(self, facts: JobFacts) -> None:
        """Closes the idle connections of the job that lead to no holder any more: another address, or secret."""
        here = {(facts.job, node, address, facts.secret) for node, address in facts.holders.items()}
        self._close_idle(lambda key: key[0] == facts.job and key not in here)

    def forget(self, job: str) -> None:
        """Closes the idle connections of a job that is over."""
        self._close_idle(lambda key: key[0] == job)

    def _close_idle(self, chosen: Callable[[Key], bool]) -> None:
        with self._lock:
            dead = [channel for key in list(self._idle) if chosen(key) for channel in self._idle.pop(key)]
        for channel in dead:
            channel.close()

    def close(self) -> None:
        """Ends all connections; whoever uses one gets Unavailable."""
        self._stopping.set()
        with self._lock:
            channels = [*self._busy, *(c for kept in self._idle.values() for c in kept)]
            self._idle.clear()
        for channel in channels:
            channel.shutdown()

    def __len__(self) -> int:
        with self._lock:
            return len(self._busy) + sum(map(len, self._idle.values()))
