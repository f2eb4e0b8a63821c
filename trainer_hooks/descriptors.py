"""The process's own sockets, as the kernel lists them in /proc/self."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable

_FDS = "/proc/self/fd"
_EVENTPOLL = "anon_inode:[eventpoll]"


def event_polls() -> list[int]:
    """Open epoll instances."""
    return [fd for fd in map(int, os.listdir(_FDS)) if _target(fd) == _EVENTPOLL]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:  # closed since it was listed
        return ""


def watched(event_poll: int) -> list[int]:
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


def connections(fds: Iterable[int]) -> list[socket.socket]:
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


def any_listening(fds: Iterable[int]) -> bool:
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
    fds: Iterable[int], still: Callable[[], Iterable[int]], how: int = socket.SHUT_RDWR
) -> list[socket.socket]:
    """Shuts the connected TCP sockets among ``fds``, in both directions unless told otherwise.

    Whoever reads from them wakes at once. ``still`` is asked again after each was duplicated: a number that was closed
    and reused by somebody else in between is left alone. Returns the duplicates of those that were shut: the
    connection lives until its owner and the caller have closed theirs.
    """
    copies = {fd: copy for fd in fds if (copy := _duplicate(fd)) is not None}
    confirmed = set(still())
    held = []
    for fd, copy in copies.items():
        if fd in confirmed and not _is_listening(copy) and _shut(copy, how):
            held.append(copy)
        else:
            copy.close()
    return held


def close_all(copies: Iterable[socket.socket]) -> None:
    """Closes duplicates."""
    for copy in copies:
        copy.close()


def connections_to(port: int) -> list[int]:
    """Descriptors of TCP connections whose far end has this port."""
    return [fd for fd in map(int, os.listdir(_FDS)) if _on_copy(fd, lambda copy: _peer_port(copy) == port)]


def _peer_port(copy: socket.socket) -> int | None:
    try:
        return int(copy.getpeername()[1])
    except OSError:
        return None
