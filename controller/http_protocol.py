"""uvicorn's HTTP protocol, with bounds on what a stranger may make it hold."""

from __future__ import annotations

import asyncio
import functools
import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from controller.api import problems
from controller.api.one_by_one import Soon

MOST_HEAD_BYTES = 16 << 10
"""Of a request's line, headers and trailers together: ours have under one KiB. Neither uvicorn nor its parser has a
bound of its own."""
MOST_HEADER_LINES = 100
"""Of headers and trailers together. Each costs about 150 bytes of memory beside its own."""
MOST_MESSAGE_BYTES = 16 << 20
"""Of a whole request as it crosses the wire. Bodies end at 1 MiB; the rest leaves room for chunks of a few bytes."""
MOST_PIPELINED = 8
"""Requests of a connection that wait for the answer to the one before. None of ours sends a second one; uvicorn queues
all that came in one piece, and reads another piece after each answer."""
HEAD_DEADLINE_S = 30.0
"""Seconds for a request's head once it has begun, and for the first byte of a connection."""
BODY_DEADLINE_S = 60.0
"""Seconds for its body: 1 MiB over a line of 140 kbit/s."""
LONGEST_REST_S = 5.0
"""For which a connection is not read from. Whoever hangs up meanwhile is noticed only then."""
UNREAD_S = 30.0
LEAST_READ_BYTES = 16 << 10
"""Of an answer in so many seconds: who takes less holds what was answered, and the connection, for nothing."""


if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_TOO_LARGE = "This request is larger than any that is understood here."
_AROUND_HEADER = len(": \r\n")

_log = logging.getLogger("controller.http")
_log.setLevel(logging.ERROR)
"""What a stranger sends is answered, not logged: uvicorn has a line, or two, for each thing that is no request."""


async def _answered(cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs a request. One that is cancelled, since the server stops, is no error for uvicorn to log."""
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        cycle.disconnected = True
        cycle.transport.abort()


class _Stage(Enum):
    """What the next bytes of a connection belong to."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    """The body, with what frames it, and the trailers."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 to a head or message that is too large and to too many at once, hangs up where a head or a body does
    not come. Trailers are counted as headers are, and dropped.

    Args:
        soon: calls what it is given one by one, in turns of the event loop: connections that rested wake so, lest the
            requests of all that were refused together come together again.

    The parser hands headers over one by one, whole; these are counted exactly. What it holds back until then (a line
    that does not end, the header of a chunk) is counted by the reads that bring nothing else, so that a connection
    holds at most one read more than MOST_HEAD_BYTES.
    """

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _stage = _Stage.HEAD
    _head_bytes = 0
    _head_lines = 0
    _held_bytes = 0
    """Received since something was last handed over by the parser that is not a header."""
    _handed_over = False
    _message_bytes = 0
    _why = ""
    _rest_s = 0.0
    _answering: tuple[RequestResponseCycle, ...] = ()
    _resting: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, soon: Soon = lambda work: work(), **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _log
        self._soon = soon

    def send_400_response(self, msg: str) -> None:
        """A problem detail, as every other refusal; nothing where the request has its answer already."""
        self._disarm()
        if self._stage is not _Stage.BODY or not self.cycle.response_started:
            body = problems.problem(400, "http", self._why or msg)
            lines = (
                b"HTTP/1.1 400 Bad Request",
                b"content-type: " + problems.MEDIA_TYPE.encode(),
                b"content-length: %d" % len(body),
                b"connection: close",
            )
            self.transport.write(b"\r\n".join((*lines, b"", body)))
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(HEAD_DEADLINE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._heed_reading()
        if self._resting is not None:
            self._resting.cancel()
        super().connection_lost(exc)
        for cycle in (*self._answering, *(waiting for waiting, _ in self.pipeline)):
            cycle.disconnected = True  # uvicorn tells the newest one only; the one being answered would go on for ever
            cycle.message_event.set()
        self.pipeline.clear()

    def abort(self) -> None:
        """Ends the connection at once, with all that was not taken."""
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = (cycle,)
        super()._start_asgi_task(cycle, cast("ASGI3Application", functools.partial(_answered, cycle, app)))

    # --- what comes in -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # TLS hands over what it has decrypted all the same
        self._handed_over = False
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._handed_over:
            self._held_bytes += len(data)
        if self._stage is _Stage.HEAD or (self._stage is _Stage.IDLE and not self._handed_over):
            self._arm(HEAD_DEADLINE_S)
        if self._held_bytes > MOST_HEAD_BYTES or self._message_bytes > MOST_MESSAGE_BYTES:
            self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = _Stage.HEAD
        self._head_bytes = self._head_lines = self._message_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _AROUND_HEADER)
        self._head_lines += 1
        if self._head_lines > MOST_HEADER_LINES:
            self._refuse(f"This request has more than {MOST_HEADER_LINES} header lines.")
        if self._stage is _Stage.HEAD:  # nothing here reads trailers, and none may be taken for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse("More requests at once than are understood here.")
        super().on_headers_complete()
        self._stage = _Stage.BODY
        self._progress()
        self._disarm()
        self._arm(BODY_DEADLINE_S)

    def on_body(self, body: bytes) -> None:
        self._progress()
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Called by the parser after each chunk."""
        self._progress()

    def on_message_complete(self) -> None:
        self._stage = _Stage.IDLE
        self._progress()
        self._disarm()
        super().on_message_complete()

    def rest(self, seconds: float) -> None:
        """Reads no further request for so long, or LONGEST_REST_S, once the one being answered is: whoever is told to
        come again later and does so at once costs nothing meanwhile."""
        self._rest_s = min(seconds, LONGEST_REST_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._rest_s and not self.transport.is_closing():
            self.flow.pause_reading()
            self._resting = self.loop.call_later(self._rest_s, lambda: self._soon(self._wake))
            self._rest_s = 0.0

    def _wake(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _progress(self) -> None:
        self._handed_over, self._held_bytes = True, 0

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def _refuse(self, why: str) -> None:
        """Ends the parser, from inside one of its calls; the data received are then answered by 400."""
        self._why = why
        raise OverflowError(why)

    def _arm(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- answers that are not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._heed_reading()
        super().resume_writing()

    def _look_again(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(UNREAD_S, lambda: self._check_reader(unread))

    def _check_reader(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < LEAST_READ_BYTES:
            self.transport.abort()
        else:
            self._look_again()

    def _heed_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
