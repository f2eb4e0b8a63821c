"""uvicorn's HTTP protocol, with bounds on what a stranger may make it hold."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controller.api import problems

MOST_HEAD_BYTES = 16 << 10
"""Of a request's line and headers: ours have under one KiB. Neither uvicorn nor its parser has a bound of its own."""
MOST_MESSAGE_BYTES = 16 << 20
"""Of a whole request as it crosses the wire. Bodies end at 1 MiB; the rest leaves room for chunks of a few bytes.
Trailers after a chunked body are held as headers are."""
MOST_PIPELINED = 32
"""Requests of a connection that wait for the answer to the one before. None of ours sends a second one; uvicorn queues
all that came in one piece, and reads another piece after each answer."""
HEAD_DEADLINE_S = 30.0
"""Seconds for a request's head once it has begun, and for the first byte of a connection."""
BODY_DEADLINE_S = 60.0
"""Seconds for its body: 1 MiB over a line of 140 kbit/s."""
UNREAD_S = 30.0
LEAST_READ_BYTES = 16 << 10
"""Of an answer in so many seconds: who takes less holds what was answered, and the connection, for nothing."""


_log = logging.getLogger("controller.http")
_log.setLevel(logging.ERROR)
"""What a stranger sends is answered, not logged: uvicorn has a line, or two, for each thing that is no request."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 to a head or message that is too large and to too many at once, hangs up where a head or a body does
    not come."""

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _head_begun = True
    _head_bytes = 0
    _message_bytes = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _log

    def send_400_response(self, msg: str) -> None:
        """A problem detail, as every other refusal."""
        body = problems.problem(400, "http", msg)
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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._message_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_begun:
            self._head_bytes += len(data)
            self._arm(HEAD_DEADLINE_S)
        if self._head_bytes > MOST_HEAD_BYTES or self._message_bytes > MOST_MESSAGE_BYTES:
            self._disarm()
            self.send_400_response("This request is larger than any that is understood here.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun, self._head_bytes, self._message_bytes = True, 0, 0

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            raise OverflowError("more requests at once than are understood here")  # the parser ends with it
        self._head_begun, self._head_bytes = False, 0
        self._disarm()
        self._arm(BODY_DEADLINE_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

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
