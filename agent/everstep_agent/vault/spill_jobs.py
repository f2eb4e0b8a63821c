"""Versions on their way to storage: which slots, what the other nodes write, and the process that writes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import msgspec

from everstep.errors import (
    UNREADABLE,
    ConfigurationError,
    DigestMismatch,
    EverstepError,
    MalformedMessage,
    NotFound,
    NotRestorable,
    Unavailable,
)
from everstep.wire.v1.local import Spill
from everstep_agent.spill.order import Order, Outcome, Refusal, Source
from everstep_agent.vault.job_table import JobBook
from everstep_agent.vault.memory.segments import SegmentStore
from everstep_agent.vault.parity.shards import Place, Shards, all_at_once, require
from everstep_agent.vault.reporting import Tally

_REFUSALS: dict[str, type[EverstepError]] = {
    kind.code: kind
    for kind in (ConfigurationError, DigestMismatch, MalformedMessage, NotFound, NotRestorable, Unavailable)
}


class Spiller:
    """Answers Spill, one after another in ``thread``; ``streams`` asks other nodes side by side."""

    def __init__(
        self, node: str, store: SegmentStore, book: JobBook, shards: Shards, tally: Tally, streams: Executor
    ) -> None:
        self._node = node
        self._store = store
        self._book = book
        self._shards = shards
        self._tally = tally
        self._streams = streams
        self._lock = threading.Lock()
        self._writing: tuple[str, subprocess.Popen[bytes]] | None = None
        self.thread = ThreadPoolExecutor(1, "spill")  # the writer ends with the thread that started it

    def spill(self, ask: Spill) -> Outcome:
        """Writes this node's part of the version; what was written before is not written again.

        Raises StaleGeneration, NotFound where a share is not where ``ask`` says (or is filled anew meanwhile),
        Unavailable where a node or the storage does not answer, DigestMismatch for a share that is not what was sealed,
        NotRestorable where the shares do not make up the whole, ConfigurationError for a URL nobody knows.
        """
        self._book.current(ask.job, ask.generation)
        sources = tuple(self._source(ask, rank) for rank in ask.writers.get(self._node, ()))
        places = [Place(ask.job, node, rank, ask.version) for node, ranks in ask.writers.items() for rank in ranks]
        facts = require(all_at_once(self._streams, [partial(self._shards.facts, place) for place in places]))
        manifests = {place.number: found.manifest for place, found in zip(places, facts, strict=True)}
        order = Order(
            url=ask.url, version=ask.version, sources=sources, manifests=manifests, complete=True, keep=ask.keep
        )
        outcome = self._write(ask.job, order)
        self._tally.add("spilled_slots", len(outcome.ranks))
        self._tally.add("spilled_bytes", outcome.bytes)
        return outcome

    def _source(self, ask: Spill, rank: int) -> Source:
        for segment, slot, _ in self._store.find(ask.job, rank, ask.version):
            return Source(rank=rank, path=str(segment.path), slot=slot)
        raise NotFound(f"no sealed slot here holds version {ask.version} of rank {rank} of job {ask.job}")

    def _write(self, job: str, order: Order) -> Outcome:
        command = [sys.executable, "-P", "-m", "everstep_agent.spill", str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            with self._lock:
                self._writing = job, writer
            try:
                said, _ = writer.communicate(msgspec.msgpack.encode(order))
            finally:
                with self._lock:
                    self._writing = None
        try:
            answer = msgspec.json.decode(said, type=Outcome | Refusal)
        except UNREADABLE as error:
            raise Unavailable(f"the writer of checkpoints ended with status {writer.returncode}") from error
        if isinstance(answer, Refusal):
            raise _REFUSALS.get(answer.code, EverstepError)(answer.message)
        return answer

    def forget(self, job: str | None = None) -> None:
        """Ends what is being written of a job, or of any."""
        with self._lock:
            if self._writing is not None and job in (None, self._writing[0]):
                self._writing[1].kill()

    def close(self) -> None:
        """Ends what is being written."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.forget()
