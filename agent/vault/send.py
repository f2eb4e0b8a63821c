"""Sending one sealed slot to one peer, over as many connections as it is worth."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Executor

from agent.vault.channel import Channel
from agent.vault.findings import Findings
from agent.vault.peers import Peers
from agent.vault.reading import Reading
from agent.vault.segments import Segment
from agent.vault.settings import VaultSettings
from agent.vault.statistics import Tally
from everstep.errors import ConfigurationError, Conflict, DigestMismatch, EverstepError, MalformedMessage, Unavailable
from everstep.ids import Version
from everstep.slots import CHUNK_BYTES, SlotHeader, chunk_count
from everstep.wire.v1.transfer import (
    MAX_TRANSFER_FRAME_BYTES,
    Ack,
    Part,
    PartDone,
    Put,
    PutDone,
    Ready,
)

PART_CHUNKS = 8
"""Chunks for which one answer is awaited: 64 MiB, so that the round trip is lost in the transfer."""


class Outgoing:
    """A slot under way to a peer, and the parts of it that nobody has sent yet."""

    def __init__(self, reading: Reading, transfer: bytes) -> None:
        self.reading = reading
        count = chunk_count(len(reading.payload))
        self._parts = deque(
            Part(transfer=transfer, first=first, chunks=min(PART_CHUNKS, count - first))
            for first in range(0, count, PART_CHUNKS)
        )
        self._stop = threading.Event()

    def send(self, channel: Channel) -> None:
        """Sends parts until none is left. Raises what the peer refuses them for; a part that broke off is put back."""
        while not self._stop.is_set():
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            try:
                self._send_part(channel, part)
            except Unavailable:
                self._parts.appendleft(part)
                raise
            except EverstepError:
                self._stop.set()
                raise

    def stop(self) -> None:
        """No further part is begun."""
        self._stop.set()

    def _send_part(self, channel: Channel, part: Part) -> None:
        channel.send(part)
        for index in range(part.first, part.first + part.chunks):
            channel.send_bulk([self.reading.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]])
            still = self.reading.still()
            channel.send_status(still)
            if not still:
                break
        channel.answer(PartDone)


class Sender:
    """Copies slots of this node to other vaults. ``streams`` runs the further connections of a large payload."""

    def __init__(
        self, settings: VaultSettings, peers: Peers, findings: Findings, tally: Tally, streams: Executor
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._findings = findings
        self._tally = tally
        self._streams = streams

    def send(
        self, generation: int, node: str, segment: Segment, slot: int, header: SlotHeader, keep: tuple[Version, ...]
    ) -> None:
        """Returns once ``node`` holds a copy that it has hashed; its copies of the versions ``keep`` stay.

        Raises Conflict where the rank filled the slot anew meanwhile, DigestMismatch where the bytes did not arrive as
        sealed (this vault then looks at its own), and what the peer refuses for.
        """
        reading = Reading(segment, slot, header)
        put = _put(reading, generation, keep)
        job = segment.key.job
        try:
            self._peers.call(job, node, lambda channel: self._send(channel, job, node, put, reading))
        except DigestMismatch:
            self._doubt_own(reading)
            raise
        self._tally.add("replicated_slots")
        self._tally.add("replicated_bytes", put.payload_bytes + len(put.manifest))

    def _send(self, channel: Channel, job: str, node: str, put: Put, reading: Reading) -> None:
        channel.send(put)
        channel.patience(self._settings.settle_timeout_s)
        answer = channel.any_answer()
        if isinstance(answer, Ack):
            return
        if not isinstance(answer, Ready):
            raise MalformedMessage(f"{node} answered a Put with {type(answer).__name__}")
        channel.patience(self._settings.io_timeout_s)
        outgoing = Outgoing(reading, answer.transfer)
        helpers = [self._streams.submit(self._peers.call, job, node, outgoing.send) for _ in range(self._helpers(put))]
        failures: list[EverstepError] = []
        try:
            outgoing.send(channel)
        except EverstepError as error:
            outgoing.stop()
            failures.append(error)
        helped = [e for h in helpers if isinstance(e := h.exception(), EverstepError)]
        if failures or any(not isinstance(e, Unavailable) for e in helped):
            raise _most_telling(failures + helped)
        outgoing.send(channel)  # what a helper that could not connect has put back
        channel.send(PutDone(transfer=answer.transfer))
        channel.patience(self._settings.settle_timeout_s)
        channel.answer(Ack)

    def _helpers(self, put: Put) -> int:
        worth = put.payload_bytes // self._settings.stream_bytes
        parts = -(-chunk_count(put.payload_bytes) // PART_CHUNKS)
        return max(0, min(self._settings.streams, worth, parts) - 1)

    def _doubt_own(self, reading: Reading) -> None:
        """The peer saw wrong bytes: were they wrong here already?"""
        try:
            reading.check([(0, len(reading.payload))])
        except Conflict:
            pass  # no longer there to be judged
        except DigestMismatch as error:
            self._findings.slot_corrupt(reading.segment, reading.slot, reading.header, error, seen_by="sender")


def _most_telling(failures: list[EverstepError]) -> EverstepError:
    """One stream's refusal ends the others too: with a broken connection, or as a transfer no longer under way."""
    return next((f for f in failures if not isinstance(f, Unavailable | MalformedMessage)), failures[0])


def _put(reading: Reading, generation: int, keep: tuple[Version, ...]) -> Put:
    header, view = reading.header, reading.segment.view
    size = len(reading.manifest) + sum(map(len, reading.digests))
    if size > MAX_TRANSFER_FRAME_BYTES - 4096:
        raise ConfigurationError(
            f"manifest and digests of rank {header.rank}'s slot take {size} bytes, "
            f"and at most {MAX_TRANSFER_FRAME_BYTES - 4096} can be sent: name fewer tensors in one slot"
        )
    return Put(
        generation=generation,
        rank=header.rank,
        version=header.version,
        slot_bytes=view.slot_bytes,
        slots=view.slots,
        payload_bytes=header.payload_bytes,
        manifest=reading.manifest,
        digests=b"".join(reading.digests),
        keep=keep,
    )
