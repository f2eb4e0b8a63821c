"""Sealed shards, chunk by chunk, wherever they are: hashed against what they were sealed as before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, wait
from typing import TypeVar

import msgspec
import xxhash

from agent.vault.findings import Findings
from agent.vault.manifests import ask_manifest
from agent.vault.parity.manifest import Facts
from agent.vault.peers import Peers
from agent.vault.reading import Library
from agent.vault.settings import VaultSettings
from everstep.channel import Channel
from everstep.errors import DigestMismatch, EverstepError, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.slots import CHUNK_BYTES, DIGEST_BYTES
from everstep.wire.v1.parity import ParityGroup
from everstep.wire.v1.transfer import Data, DataEnd, Digests, DigestsAsk, Get

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True):
    """A shard of a version on a node: rank ``number``'s, or the parity of group ``number``."""

    job: str
    node: str
    number: int
    version: Version
    parity: bool = False

    def __str__(self) -> str:
        whose = "the parity of group" if self.parity else "rank"
        return f"{whose} {self.number}'s version {self.version} on {self.node}"


class Shards:
    """Reads shards of this node and of others. Safe to use from any thread."""

    def __init__(self, settings: VaultSettings, library: Library, peers: Peers, findings: Findings) -> None:
        self._settings = settings
        self._library = library
        self._peers = peers
        self._findings = findings

    def facts(self, place: Place, known: Mapping[bytes, bytes] = {}, group: ParityGroup | None = None) -> Facts:
        """What is sealed there, the manifest hashed. ``known``: manifests by their digests, which are not asked for.
        ``group``: parity is to be made of it, and the node is told by which group.

        Raises NotFound where the node holds no such shard or is not known, Unavailable, DigestMismatch,
        MalformedMessage.
        """
        if place.node == self._settings.node:
            reading = self._library.open(place.job, place.number, place.version, (), parity=place.parity)
            return _facts(len(reading.payload), reading.manifest, b"".join(reading.digests), place)

        def ask(channel: Channel) -> tuple[Digests, bytes]:
            channel.send(DigestsAsk(rank=place.number, version=place.version, parity=place.parity, group=group))
            channel.patience(self._settings.settle_timeout_s)
            said = channel.answer(Digests)
            manifest = known.get(said.digests[:DIGEST_BYTES])
            if manifest is None:
                manifest = ask_manifest(channel, self._settings, place.number, place.version, parity=place.parity)
            return said, manifest

        said, manifest = self._peers.call(place.job, place.node, ask)
        if xxhash.xxh3_128_digest(manifest) != said.digests[:DIGEST_BYTES]:
            self._corrupt(place, "its manifest did not hash right")
        return _facts(said.payload_bytes, manifest, said.digests, place)

    def chunk(self, place: Place, facts: Facts, index: int, into: memoryview) -> None:
        """Fills ``into``, as long as the chunk, with chunk ``index`` of the shard that was sealed as ``facts``.

        Raises NotFound where it is not there any more, Unavailable, and DigestMismatch for other bytes than those.
        """
        if place.node == self._settings.node:
            self._copy(place, index, into)
        else:
            self._peers.call(place.job, place.node, lambda channel: self._get(channel, place, index, into))
        if xxhash.xxh3_128_digest(into) != facts.digest(index):
            self._corrupt(place, f"chunk {index} is not what was sealed as that version")

    def _copy(self, place: Place, index: int, into: memoryview) -> None:
        at = index * CHUNK_BYTES
        reading = self._library.open(place.job, place.number, place.version, ((at, len(into)),), parity=place.parity)
        into[:] = reading.payload[at : at + len(into)]
        reading.require_still()

    def _get(self, channel: Channel, place: Place, index: int, into: memoryview) -> None:
        ranges = ((index * CHUNK_BYTES, len(into)),)
        channel.send(Get(rank=place.number, version=place.version, ranges=ranges, parity=place.parity))
        channel.patience(self._settings.settle_timeout_s)
        length = channel.answer(Data).bytes
        if length != len(into):
            raise MalformedMessage(f"{place.node} announced {length} bytes where {len(into)} were asked for")
        channel.patience(self._settings.io_timeout_s)
        channel.receive_into(into)
        moved_on = not channel.status()
        channel.answer(DataEnd)  # raises what the peer refuses for
        if moved_on:
            raise MalformedMessage(f"{place.node} said that the slot moved on, and then that it did not")

    def _corrupt(self, place: Place, detail: str) -> None:
        if place.node != self._settings.node:
            self._findings.transfer_corrupt(place.job, place.node, place.number, place.version, detail)
        raise DigestMismatch(f"{place}: {detail}")


def _facts(payload_bytes: int, manifest: bytes, digests: bytes, place: Place) -> Facts:
    return Facts(payload_bytes=payload_bytes, manifest=manifest, digests=digests).check(str(place))


def all_at_once(streams: Executor, works: Iterable[Callable[[], T]]) -> list[T | EverstepError]:
    """Runs each in a thread and waits for all of them: results, or why there is none."""
    futures = [streams.submit(work) for work in works]
    wait(futures)
    found: list[T | EverstepError] = []
    for future in futures:
        error = future.exception()
        if error is None:
            found.append(future.result())
        elif isinstance(error, EverstepError):
            found.append(error)
        else:
            raise error
    return found


def require(found: Iterable[T | EverstepError]) -> list[T]:
    """The results. Raises the first of the errors."""
    results = []
    for one in found:
        if isinstance(one, EverstepError):
            raise one
        results.append(one)
    return results


def not_a_home(node: str, group: int) -> NotFound:
    """The refusal of a vault that is asked for a parity which is another's."""
    return NotFound(f"{node} is no home of the parity of group {group}")
