"""Asking all controllers by which epoch they lead, for one that cannot reach the database and so cannot know.

One of them may have taken over meanwhile, and the one that asks not reach it. What is found is carried back
(``Heartbeat.succession``); whether it is true is for that controller to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from everstep.errors import UNREADABLE
from everstep.ids import Whole
from everstep.wire.v1.agent import Succession
from everstep.wire.v1.base import ShortText

MOST_ANSWER_BYTES = 16 << 10


class _Ready(msgspec.Struct):
    """The part of ``/readyz`` that matters here; a controller that stands by shows no epoch."""

    epoch: Whole = 0
    proof: ShortText = ""


_READY = msgspec.json.Decoder(_Ready)


async def newest_succession(urls: Sequence[str], tls: ssl.SSLContext | None, within_s: float) -> Succession | None:
    """The highest epoch by which one of the controllers says it leads; None where none says so in time."""
    found = await asyncio.gather(*(_asked(url, tls, within_s) for url in urls))
    newest = max(found, key=lambda ready: ready.epoch, default=_Ready())
    return Succession(epoch=newest.epoch, proof=newest.proof) if newest.epoch else None


async def _asked(url: str, tls: ssl.SSLContext | None, within_s: float) -> _Ready:
    """What a controller says; of one that does not answer, or says something else, nothing is known."""
    try:
        async with asyncio.timeout(within_s):
            return _READY.decode(await _get(url, tls))
    except (OSError, TimeoutError, *UNREADABLE):
        return _Ready()


async def _get(url: str, tls: ssl.SSLContext | None) -> bytes:
    """The body of its answer to ``GET /readyz``, as far as that is read."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls if secure else None)
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) <= MOST_ANSWER_BYTES and (more := await reader.read(MOST_ANSWER_BYTES)):
            answer += more
        return answer.partition(b"\r\n\r\n")[2]
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
