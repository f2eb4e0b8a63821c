"""Resets that come too late to be news, kept from gloo.

The kernel closes a dead process's connections: gloo's thread reads the end of the stream and wakes whoever waits. What
is written to such a connection is answered with a reset, and if gloo's thread has not read the end by then, the write
after that fails. gloo ignores this (gloo/transport/tcp/pair.cc, ``Pair::write`` on EPIPE and ECONNRESET) and puts the
operation into ``tx_``, where ``signalException`` looks at no unbound buffer: its waiter sleeps until the group's
time-out, and nothing that is done to the connection wakes it any more. One send makes two writes, its announcement
and its data, so the first of them breaks the second.

These resets are dropped by a socket filter. The writes then succeed, and the end of the stream, which came before, is
read as ever. A reset that itself tells of the death, of a process that left data unread, acknowledges something as well
and passes; what is written after one of those is ignored by gloo as before, and a process that cannot be freed is
replaced (``Presence``). That a peer's host has restarted and knows the connection no more is for the agents to tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python has no name for it
_FLAGS_AT, _RST, _ACK = 13, 0x04, 0x10  # in the TCP header, where a filter of a TCP socket begins to read
_LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06  # linux/bpf_common.h
_ALL = 0xFFFFFFFF

# A reset that answers what was written has no ACK; one that a peer sends of its own accord has (RFC 9293, 3.10.7).
_INSTRUCTIONS = (
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _RST | _ACK),
    (_JUMP_EQUAL, 0, 1, _RST),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _ALL),
)
_PROGRAM = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _INSTRUCTIONS))

_make = dist.ProcessGroupGloo.__init__
_connections: Callable[[], Iterable[socket.socket]] = tuple


def drop_late(connection: socket.socket) -> None:
    """From here on what is written to a connection that its peer has closed is lost, and is no error."""
    program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(_PROGRAM))
    with contextlib.suppress(OSError):  # forbidden here: then gloo's connections are as they always were
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@wraps(_make)
def _make_and_filter(group: Any, *args: Any, **options: Any) -> None:
    _make(group, *args, **options)
    for connection in _connections():
        with connection:
            drop_late(connection)


def install(connections: Callable[[], Iterable[socket.socket]]) -> None:
    """Drops such resets on the connections of every gloo group that is made from here on.

    Args:
        connections: duplicates of the connections that gloo has open; a group has its own once it is made.
    """
    global _connections
    _connections = connections
    dist.ProcessGroupGloo.__init__ = _make_and_filter  # type: ignore[method-assign, assignment]
