"""Out of a hung collective: how each kind of process group is made to let go.

A collective blocks in C++ until its peers answer or a time-out of minutes passes. When the agent says that the
generation is over, nothing is worth waiting for, and every collective of the process is ended from the signal
thread: whoever waits for an aborted one gets an error, and whoever enters one later gets it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep_trainer.runtime import interrupt

# ---- descriptors
# The process's own sockets, as the kernel lists them in /proc/self.

_FDS = "/proc/self/fd"
_EVENTPOLL = "anon_inode:[eventpoll]"


def list_epoll_fds() -> list[int]:
    """Open epoll instances."""
    return [fd for fd in map(int, os.listdir(_FDS)) if _target(fd) == _EVENTPOLL]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:  # closed since it was listed
        return ""


def epoll_targets(event_poll: int) -> list[int]:
    """Descriptors registered with an epoll instance (``tfd`` lines of its fdinfo); empty where it is gone."""
    try:
        with open(f"/proc/self/fdinfo/{event_poll}") as info:
            return [int(line.split()[1]) for line in info if line.startswith("tfd:")]
    except OSError:
        return []


def is_pipe(fd: int) -> bool:
    """Whether the descriptor is open and a pipe."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _duplicate(fd: int) -> socket.socket | None:
    """An own descriptor of a TCP socket: it stays valid whatever the owner does meanwhile. None for all else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
        return copy
    copy.close()
    return None


def duplicate_connections(fds: Iterable[int]) -> list[socket.socket]:
    """Duplicates of the TCP sockets among the descriptors that are not listening."""
    found = []
    for copy in filter(None, map(_duplicate, fds)):
        if _is_listening(copy):
            copy.close()
        else:
            found.append(copy)
    return found


def _is_listening(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def has_listening_socket(fds: Iterable[int]) -> bool:
    """Whether one of the descriptors is a TCP socket that accepts connections."""
    return any(_on_copy(fd, _is_listening) for fd in fds)


def _on_copy(fd: int, question: Callable[[socket.socket], bool]) -> bool:
    copy = _duplicate(fd)
    if copy is None:
        return False
    with copy:
        return question(copy)


def _shut(copy: socket.socket, how: int) -> bool:
    try:
        copy.shutdown(how)
    except OSError:  # not connected, or the peer was faster
        return False
    return True


def shut_connections(
    fds: Iterable[int], list_again: Callable[[], Iterable[int]], how: int = socket.SHUT_RDWR
) -> list[socket.socket]:
    """Shuts the connected TCP sockets among ``fds``, in both directions unless told otherwise.

    Whoever reads from them wakes at once. ``list_again`` is asked again after each was duplicated: a number that was
    closed and reused by somebody else in between is left alone. Returns the duplicates of those that were shut: the
    connection lives until its owner and the caller have closed theirs.
    """
    copies = {fd: copy for fd in fds if (copy := _duplicate(fd)) is not None}
    confirmed = set(list_again())
    held = []
    for fd, copy in copies.items():
        if fd in confirmed and not _is_listening(copy) and _shut(copy, how):
            held.append(copy)
        else:
            copy.close()
    return held


def close_sockets(copies: Iterable[socket.socket]) -> None:
    """Closes duplicates."""
    for copy in copies:
        copy.close()


def connections_to_port(port: int) -> list[int]:
    """Descriptors of TCP connections whose far end has this port."""
    return [fd for fd in map(int, os.listdir(_FDS)) if _on_copy(fd, lambda copy: _peer_port(copy) == port)]


def _peer_port(copy: socket.socket) -> int | None:
    try:
        return int(copy.getpeername()[1])
    except OSError:
        return None


# ---- resets
# Resets that come too late to be news, kept from gloo.
#
# The kernel closes a dead process's connections: gloo's thread reads the end of the stream and wakes whoever waits.
# What
# is written to such a connection is answered with a reset, and if gloo's thread has not read the end by then, the write
# after that fails. gloo ignores this (gloo/transport/tcp/pair.cc, ``Pair::write`` on EPIPE and ECONNRESET) and puts the
# operation into ``tx_``, where ``signalException`` looks at no unbound buffer: its waiter sleeps until the group's
# time-out, and nothing that is done to the connection wakes it any more. One send makes two writes, its announcement
# and its data, so the first of them breaks the second.
#
# These resets are dropped by a socket filter. The writes then succeed, and the end of the stream, which came before, is
# read as ever. A reset that itself tells of the death, of a process that left data unread, acknowledges something as
# well
# and passes; what is written after one of those is ignored by gloo as before, and a process that cannot be freed is
# replaced (``Presence``). That a peer's host has restarted and knows the connection no more is for the agents to tell.

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

_original_init = dist.ProcessGroupGloo.__init__
_connections: Callable[[], Iterable[socket.socket]] = tuple


def ignore_late_resets(connection: socket.socket) -> None:
    """From here on what is written to a connection that its peer has closed is lost, and is no error."""
    program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(_PROGRAM))
    with contextlib.suppress(OSError):  # forbidden here: then gloo's connections are as they always were
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@wraps(_original_init)
def _init_and_filter(group: Any, *args: Any, **options: Any) -> None:
    _original_init(group, *args, **options)
    for connection in _connections():
        with connection:
            ignore_late_resets(connection)


def install_reset_filter(connections: Callable[[], Iterable[socket.socket]]) -> None:
    """Drops such resets on the connections of every gloo group that is made from here on.

    Args:
        connections: duplicates of the connections that gloo has open; a group has its own once it is made.
    """
    global _connections
    _connections = connections
    dist.ProcessGroupGloo.__init__ = _init_and_filter  # type: ignore[method-assign, assignment]


logger = logging.getLogger(__name__)

HOLD_OPEN_S = 1.0
"""How long aborted connections are kept open: survivors hear of a new generation within tens of milliseconds of one
another, and none should see another's connection close before it has aborted its own."""

NCCL_SETUP_TIMEOUT_S = 120
"""Longest set-up of an NCCL communicator. While torch waits for one it holds a lock that an abort needs."""


class CollectiveBackend(Protocol):
    """What regrouping needs of one kind of process group."""

    @property
    def name(self) -> str:
        """The backend string for ``init_process_group``."""

    def prepare(self) -> None:
        """Before the first group of the process: settings that the library reads once."""

    def connect(self, device: torch.device) -> None:
        """Begins to set up the default group's communicator for ``device``, where it has one; does not wait for it."""

    def abort(self) -> int:
        """Ends the collectives of all groups of the process, now and for good; callable from any thread, repeatedly.

        Returns how many connections or communicators were ended by this call.
        """

    def wait_aborted(self, timeout_s: float) -> bool:
        """Waits until all that ``abort`` began is done; False where that takes longer than ``timeout_s``."""


def gloo_event_loops() -> list[int]:
    """The epoll instances of gloo devices in this process.

    One is known by what it watches: the pipe of its deferred calls and its listening TCP socket, beside the
    connections of its pairs (gloo/transport/tcp/loop.cc). Python's selectors and libuv watch no pipe together with
    a listening socket. So connections that gloo opened late are found too, and the store's, the agent's and the
    vault's never are.
    """
    found = []
    for event_poll in list_epoll_fds():
        fds = epoll_targets(event_poll)
        if any(map(is_pipe, fds)) and has_listening_socket(fds):
            found.append(event_poll)
    return found


def gloo_connections() -> list[socket.socket]:
    """Duplicates of the connections that gloo has open."""
    return [copy for loop in gloo_event_loops() for copy in duplicate_connections(epoll_targets(loop))]


class GlooBackend:
    """Ends gloo's collectives by shutting its connections; ``ProcessGroupGloo.abort`` does not wake a waiter.

    They are shut for reading, and kept open for HOLD_OPEN_S by duplicates. gloo's thread then reads the end of the
    stream, which wakes those that wait. Were a connection closed at once, or shut for writing, a write that this or the
    other process is about to make would fail; gloo ignores that and leaves the operation behind it waiting (pair.cc,
    ``Pair::write`` on EPIPE and ECONNRESET).
    """

    name = "gloo"

    def prepare(self) -> None:
        interrupt.install_sliced_waits()
        install_reset_filter(gloo_connections)

    def connect(self, device: torch.device) -> None:
        """gloo connects all ranks when a group is made."""

    def wait_aborted(self, timeout_s: float) -> bool:
        return True

    def abort(self) -> int:
        held = [copy for loop in gloo_event_loops() for copy in self._shut_connections_of(loop)]
        if held:
            timer = threading.Timer(HOLD_OPEN_S, close_sockets, [held])
            timer.daemon = True
            timer.start()
        return len(held)

    @staticmethod
    def _shut_connections_of(loop: int) -> list[socket.socket]:
        of_loop = partial(epoll_targets, loop)
        return shut_connections(of_loop(), of_loop, socket.SHUT_RD)


class NcclBackend:
    """Ends NCCL's communicators with ``ncclCommAbort``, each from a thread of its own.

    Aborting one communicator may wait for another of the same process, so all are begun together. gloo carries the
    CPU tensors of the same groups and is ended with them.

    All communicators of the process are non-blocking: the set-up of a blocking one cannot be aborted. The set-up of a
    non-blocking one can, until a collective is called: torch then waits for the set-up under a lock that an abort
    needs, for NCCL_SETUP_TIMEOUT_S at most. Therefore ``connect`` comes first, and no collective before all ranks are
    known to have called it.
    """

    name = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self._gloo = GlooBackend()
        self._abort_threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """torch's own watchdog must neither end the process nor abort behind our back: that is decided here."""
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")  # also of the groups that users make
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(NCCL_SETUP_TIMEOUT_S))
        install_reset_filter(gloo_connections)

    def connect(self, device: torch.device) -> None:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        backend.eager_connect_single_device(device)

    def abort(self) -> int:
        ended = self._gloo.abort()
        for backend in self._communicators():
            thread = threading.Thread(target=self._abort_one, args=(backend,), name="everstep-nccl-abort", daemon=True)
            with self._lock:
                if id(backend) in self._abort_threads:
                    continue
                self._abort_threads[id(backend)] = thread
                thread.start()
            ended += 1
        return ended

    def wait_aborted(self, timeout_s: float) -> bool:
        deadline = perf_counter() + timeout_s
        with self._lock:
            begun = list(self._abort_threads.values())
        for thread in begun:
            thread.join(max(0.0, deadline - perf_counter()))
        return not any(thread.is_alive() for thread in begun)

    def _communicators(self) -> list[Any]:
        """NCCL backends of all live groups. torch keeps them in a private table; there is no public one."""
        device = torch.device("cuda")
        groups = list(dist.distributed_c10d._world.pg_map)
        return [g._get_backend(device) for g in groups if device in g._device_types]

    def _abort_one(self, backend: Any) -> None:
        try:
            backend.abort()
        except RuntimeError as error:
            logger.warning("aborting an NCCL communicator failed: %s", error)
        finally:
            with self._lock:
                self._abort_threads.pop(id(backend), None)


def make_backend(name: str) -> CollectiveBackend:
    """The backend for a setting of ``auto``, ``gloo`` or ``nccl``."""
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    return NcclBackend() if name == "nccl" else GlooBackend()
