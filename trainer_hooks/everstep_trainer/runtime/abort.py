"""Abort hung collectives, for each kind of process group.

A collective blocks in C++ until its peers answer or a time-out of minutes passes. When the agent says that the
generation is over, the signal thread ends every collective of the process, and each waiting thread gets an error.
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
from typing import Any

import torch
import torch.distributed as dist

from everstep_trainer.base import interrupt

# ---- the process's own sockets, as the kernel lists them in /proc/self

_FDS = "/proc/self/fd"
_EVENTPOLL = "anon_inode:[eventpoll]"


def list_epoll_fds() -> list[int]:
    """Return the open epoll instances."""
    found = []
    for fd in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.readlink(f"{_FDS}/{fd}") == _EVENTPOLL:
                found.append(int(fd))
    return found


def epoll_targets(event_poll: int) -> list[int]:
    """Return the descriptors registered with an epoll instance (``tfd`` lines of its fdinfo); empty if it is gone."""
    try:
        with open(f"/proc/self/fdinfo/{event_poll}") as info:
            return [int(line.split()[1]) for line in info if line.startswith("tfd:")]
    except OSError:
        return []


def is_pipe(fd: int) -> bool:
    """Return whether the descriptor is open and a pipe."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _duplicate(fd: int) -> socket.socket | None:
    """Duplicate a TCP socket, so that it stays valid whatever its owner does; return None for all else."""
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


def _is_listening(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _check_duplicate(fd: int, predicate: Callable[[socket.socket], bool]) -> bool:
    copy = _duplicate(fd)
    if copy is None:
        return False
    with copy:
        return predicate(copy)


def shut_connections(
    fds: Iterable[int], list_again: Callable[[], Iterable[int]], how: int = socket.SHUT_RDWR
) -> list[socket.socket]:
    """Shut the connected TCP sockets among ``fds``, in both directions by default, and return duplicates that keep them
    open. Descriptors that ``list_again`` no longer lists were reused meanwhile, and are left alone."""
    copies = {fd: copy for fd in fds if (copy := _duplicate(fd)) is not None}
    confirmed = set(list_again())
    held = []
    for fd, copy in copies.items():
        if fd in confirmed and not _is_listening(copy):
            with contextlib.suppress(OSError):  # not connected, or the peer was faster
                copy.shutdown(how)
                held.append(copy)
                continue
        copy.close()
    return held


def close_sockets(copies: Iterable[socket.socket]) -> None:
    for copy in copies:
        copy.close()


def connections_to_port(port: int) -> list[int]:
    """Return the descriptors of TCP connections to this port of a peer."""

    def goes_to_port(copy: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            return bool(copy.getpeername()[1] == port)
        return False

    return [fd for fd in map(int, os.listdir(_FDS)) if _check_duplicate(fd, goes_to_port)]


# ---- drop late resets before gloo sees them
#
# The kernel closes a dead process's connections; gloo's thread reads the end of the stream and wakes the waiters. A
# write to such a connection is answered with a reset. If gloo's thread has not read the end by then, the next write
# fails. gloo ignores this failure (gloo/transport/tcp/pair.cc, ``Pair::write`` on EPIPE and ECONNRESET) and puts the
# operation into ``tx_``, where ``signalException`` looks at no unbound buffer. Its waiter then sleeps until the group's
# time-out, and nothing done to the connection wakes it. One send makes two writes, header and data, so the first breaks
# the second.
#
# A socket filter drops these resets. The writes then succeed, and the end of the stream, which came before, is read as
# usual. A reset from a process that died with unread data also carries an acknowledgement, and passes the filter; a
# process that cannot be freed is replaced (``GenerationMembership``).

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python has no name for it
_FLAGS_AT, _RST, _ACK = 13, 0x04, 0x10  # offsets in the TCP header, where a filter of a TCP socket begins to read
_LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06  # linux/bpf_common.h
_SNAP_LENGTH = 0xFFFFFFFF

# A reset in answer to a write has no ACK; one that a peer sends of its own accord has (RFC 9293, 3.10.7).
_INSTRUCTIONS = (
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _RST | _ACK),
    (_JUMP_EQUAL, 0, 1, _RST),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _SNAP_LENGTH),
)
_PROGRAM = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _INSTRUCTIONS))

_original_init = dist.ProcessGroupGloo.__init__


def ignore_late_resets(connection: socket.socket) -> None:
    """Make later writes to the connection succeed without effect after its peer has closed it."""
    program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(_PROGRAM))
    with contextlib.suppress(OSError):  # forbidden here: gloo's connections then behave as without the filter
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@wraps(_original_init)
def _init_and_filter(group: Any, *args: Any, **options: Any) -> None:
    _original_init(group, *args, **options)
    for connection in filter(None, (_duplicate(fd) for loop in gloo_event_loops() for fd in epoll_targets(loop))):
        with connection:
            if not _is_listening(connection):
                ignore_late_resets(connection)


def install_reset_filter() -> None:
    """Drop late resets on connections of gloo groups made from now on."""
    dist.ProcessGroupGloo.__init__ = _init_and_filter  # type: ignore[method-assign, assignment]


logger = logging.getLogger(__name__)

HOLD_OPEN_S = 1.0  # that aborted connections stay open, until other survivors have aborted theirs too

NCCL_SETUP_TIMEOUT_S = 120  # of a communicator; while torch waits for it, it holds a lock that an abort needs


def gloo_event_loops() -> list[int]:
    """Return the epoll instances of gloo devices in this process, recognised by the pipe and the listening TCP socket
    that they watch (gloo/transport/tcp/loop.cc). Python's selectors and libuv watch no such pair."""
    found = []
    for event_poll in list_epoll_fds():
        fds = epoll_targets(event_poll)
        if any(map(is_pipe, fds)) and any(_check_duplicate(fd, _is_listening) for fd in fds):
            found.append(event_poll)
    return found


class GlooBackend:
    """Ends gloo's collectives by shutting its connections for reading; ``ProcessGroupGloo.abort`` wakes no waiter.
    Duplicates keep them open for HOLD_OPEN_S, since gloo ignores failed writes (see above)."""

    name = "gloo"  # the backend string for ``init_process_group``

    def prepare(self) -> None:
        """Apply settings that the library reads once, before the process's first group."""
        interrupt.install_sliced_waits()
        install_reset_filter()

    def connect(self, device: torch.device) -> None:
        """Begin to set up the default group's communicator for ``device``; gloo connects when a group is made."""

    def wait_aborted(self, timeout_s: float) -> bool:
        """Wait for all that ``abort`` began; return False if that takes longer than ``timeout_s``."""
        return True

    def abort(self) -> int:
        """End all groups' collectives for good; from any thread, repeatedly. Returns how many connections ended now."""
        held: list[socket.socket] = []
        for loop in gloo_event_loops():
            of_loop = partial(epoll_targets, loop)
            held += shut_connections(of_loop(), of_loop, socket.SHUT_RD)
        if held:
            timer = threading.Timer(HOLD_OPEN_S, close_sockets, [held])
            timer.daemon = True
            timer.start()
        return len(held)


class NcclBackend(GlooBackend):
    """Ends NCCL's communicators with ``ncclCommAbort`` and gloo's connections. One abort may wait for another, so all
    begin together, each in a thread. All communicators are non-blocking: the set-up of a blocking one cannot be
    aborted, and that of another only until a collective is called. torch then waits under a lock that an abort needs,
    for at most NCCL_SETUP_TIMEOUT_S. So ``connect`` comes first, and no collective runs before all ranks are known to
    have called it."""

    name = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self._abort_threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Keep torch's own watchdog from ending the process or aborting by itself."""
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")  # also for groups that users make
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(NCCL_SETUP_TIMEOUT_S))
        install_reset_filter()

    def connect(self, device: torch.device) -> None:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        backend.eager_connect_single_device(device)

    def abort(self) -> int:
        ended = super().abort()
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
        """Return the NCCL backends of all live groups, from torch's private table; there is no public one."""
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


def make_backend(name: str) -> GlooBackend:
    """Return the backend for the setting ``auto``, ``gloo`` or ``nccl``."""
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    return NcclBackend() if name == "nccl" else GlooBackend()
