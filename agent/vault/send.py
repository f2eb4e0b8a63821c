"""Sending one sealed slot to one peer, over as many connections as it is worth."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor

from agent.vault.findings import Findings
from agent.vault.pacing import Pace
from agent.vault.peers import Peers
from agent.vault.reading import Reading
from agent.vault.segments import Segment
from agent.vault.settings import VaultSettings
from agent.vault.statistics import Tally
from everstep.channel import Channel
from everstep.clock import Clock
from everstep.errors import Conflict, DigestMismatch, EverstepError, MalformedMessage, Unavailable
from everstep.ids import Version
from everstep.slots import CHUNK_BYTES, SlotHeader, chunk_count
from everstep.wire.v1.transfer import (
    Ack,
    ManifestPart,
    Part,
    PartDone,
    Put,
    PutDone,
    Ready,
    chunks_without,
)

PART_CHUNKS = 8
"""Chunks for which one answer is awaited: 64 MiB, so that the round trip is lost in the transfer."""


MOST_ATTEMPTS = 8
"""Connections that one slot's copy may break; more is a peer, or a network, that does not work."""
PIECE_BYTES = 1 << 20
"""Sent at a time where a pace is kept, so that the wire is shared evenly."""


class Outgoing:
    """A slot under way to a peer, and the parts of it that nobody has sent yet.

    Args:
        ready: the peer's answer, which says what it has already.

    Attributes:
        sent: chunks that the peer has hashed, and the manifest where it had to be sent.
    """

    def __init__(self, reading: Reading, ready: Ready, pace: Pace) -> None:
        self.reading = reading
        self.sent = 0
        self._pace = pace
        self._transfer = ready.transfer
        self._lacks_manifest = ready.manifest
        missing = chunks_without(chunk_count(len(reading.payload)), ready.here)
        self._parts = deque(_parts(ready.transfer, missing))
        self._stop = threading.Event()

    def __len__(self) -> int:
        """Parts that nobody sends."""
        return len(self._parts)

    def send_manifest(self, channel: Channel) -> None:
        """Where the peer has none like it. Raises what it refuses it for."""
        if not self._lacks_manifest:
            return
        channel.send(ManifestPart(transfer=self._transfer))
        manifest = memoryview(self.reading.manifest)
        for start in range(0, len(manifest), CHUNK_BYTES):
            for piece in self._pieces(manifest[start : start + CHUNK_BYTES]):
                self._pace.take(len(piece))
                channel.send_bulk([piece])
            channel.send_status(True)  # it is a copy, and hashed right
        channel.answer(PartDone)
        self.sent += 1

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
            for piece in self._pieces(self.reading.payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]):
                self._pace.take(len(piece))
                channel.send_bulk([piece])
            still = self.reading.still()
            channel.send_status(still)
            if not still:
                break
        channel.answer(PartDone)
        self.sent += part.chunks

    def _pieces(self, chunk: memoryview) -> list[memoryview]:
        if not self._pace.bounded:
            return [chunk]
        return [chunk[at : at + PIECE_BYTES] for at in range(0, len(chunk), PIECE_BYTES)]


def _parts(transfer: bytes, missing: list[int]) -> Iterator[Part]:
    """Runs of missing chunks, none longer than is worth one answer."""
    first, count = 0, 0
    for chunk in missing:
        if count and (chunk != first + count or count == PART_CHUNKS):
            yield Part(transfer=transfer, first=first, chunks=count)
            count = 0
        if not count:
            first = chunk
        count += 1
    if count:
        yield Part(transfer=transfer, first=first, chunks=count)


class Sender:
    """Copies slots of this node to other vaults. ``streams`` runs the further connections of a large payload."""

    def __init__(
        self, settings: VaultSettings, peers: Peers, findings: Findings, tally: Tally, streams: Executor, clock: Clock
    ) -> None:
        self._pace = Pace(settings.send_bytes_per_s, clock)
        self._settings = settings
        self._peers = peers
        self._findings = findings
        self._tally = tally
        self._streams = streams

    def send(
        self, generation: int, node: str, segment: Segment, slot: int, header: SlotHeader, keep: tuple[Version, ...]
    ) -> None:
        """Returns once ``node`` holds a copy that it has hashed; its copies of the versions ``keep`` stay.

        Where a connection breaks after some of it arrived, another goes on from there.

        Raises Conflict where the rank filled the slot anew meanwhile, DigestMismatch where the bytes did not arrive as
        sealed (this vault then looks at its own), and what the peer refuses for.
        """
        reading = Reading(segment, slot, header)
        put = _put(reading, generation, keep)
        job = segment.key.job
        begun: list[Outgoing] = []
        for attempt in range(MOST_ATTEMPTS):
            begun.clear()
            try:
                self._peers.call(job, node, lambda channel: self._send(channel, job, node, put, reading, begun))
                break
            except DigestMismatch:
                self._doubt_own(reading)
                raise
            except Unavailable:
                if not any(outgoing.sent for outgoing in begun) or attempt + 1 == MOST_ATTEMPTS:
                    raise
        self._tally.add("replicated_slots")
        self._tally.add("replicated_bytes", put.payload_bytes + put.manifest_bytes)

    def _send(self, channel: Channel, job: str, node: str, put: Put, reading: Reading, begun: list[Outgoing]) -> None:
        channel.send(put)
        channel.patience(self._settings.settle_timeout_s)
        answer = channel.any_answer()
        if isinstance(answer, Ack):
            return
        if not isinstance(answer, Ready):
            raise MalformedMessage(f"{node} answered a Put with {type(answer).__name__}")
        channel.patience(self._settings.io_timeout_s)
        outgoing = Outgoing(reading, answer, self._pace)
        begun.append(outgoing)
        outgoing.send_manifest(channel)
        count = self._helpers(put, len(outgoing))
        helpers = [self._streams.submit(self._peers.call, job, node, outgoing.send) for _ in range(count)]
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

    def _helpers(self, put: Put, parts: int) -> int:
        worth = put.payload_bytes // self._settings.stream_bytes
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
    return Put(
        generation=generation,
        rank=header.rank,
        version=header.version,
        slot_bytes=view.slot_bytes,
        slots=view.slots,
        payload_bytes=header.payload_bytes,
        manifest_bytes=len(reading.manifest),
        digests=b"".join(reading.digests),
        keep=keep,
    )
