"""Limits of the machine: memcpy into warm shared memory, and bytes over raw loopback TCP."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bench.processes import ProcessPool, gather
from everstep_agent.vault.memory.shared_memory import populate

MESSAGE_BYTES = 8 << 20
"""Sent and received at a time, which is a vault's chunk."""
HOST = "127.0.0.1"


class WarmMemory:
    """Shared memory whose pages are there, with the first ``nbytes`` of some arrays to copy into it and back."""

    def __init__(self, directory: Path, arrays: Iterable[np.ndarray], nbytes: int) -> None:
        path = directory / f"warm-{os.getpid()}-{nbytes}"
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        path.unlink()
        populate(self._map)
        target = np.frombuffer(self._map, np.uint8)
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        at = 0
        for array in arrays:
            source = array.reshape(-1).view(np.uint8)[: nbytes - at]
            if not source.size:
                break
            self._pairs.append((source, target[at : at + source.size]))
            at += source.size
        self.nbytes = at
        self.store_s()

    def store_s(self) -> float:
        """Seconds of a memcpy of all of it into the shared memory."""
        began = time.perf_counter()
        for source, target in self._pairs:
            np.copyto(target, source)
        return time.perf_counter() - began

    def load_s(self) -> float:
        """Seconds of a memcpy back, into the arrays' own memory."""
        began = time.perf_counter()
        for source, target in self._pairs:
            np.copyto(source, target)
        return time.perf_counter() - began


def receiver(streams: int, nbytes: int, repeats: int, directory: str, ports: list[int]) -> None:
    """Takes ``nbytes`` over ``streams`` connections, ``repeats`` times, into warm shared memory, and says when."""
    parts = _parts(directory, streams, nbytes)

    def take(port: int, part: memoryview) -> None:
        with socket.create_connection((HOST, port)) as connection:
            for _ in range(repeats):
                at = 0
                while at < len(part):
                    at += connection.recv_into(part[at : at + MESSAGE_BYTES])
                connection.sendall(b"!")

    _all([threading.Thread(target=take, args=pair) for pair in zip(ports, parts, strict=True)])


def sender(streams: int, nbytes: int, repeats: int, directory: str, listeners: list[socket.socket]) -> list[float]:
    """Seconds from the first byte of each round until every stream's last word."""
    parts = _parts(directory, streams, nbytes)
    connections = [listener.accept()[0] for listener in listeners]

    def give(connection: socket.socket, part: memoryview) -> None:
        for at in range(0, len(part), MESSAGE_BYTES):
            connection.sendall(part[at : at + MESSAGE_BYTES])
        connection.recv(1)

    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        _all([threading.Thread(target=give, args=pair) for pair in zip(connections, parts, strict=True)])
        took.append(time.perf_counter() - began)
    for connection in connections:
        connection.close()
    return took


def loopback(pool: ProcessPool, directory: Path, streams: int, nbytes: int, repeats: int) -> list[float]:
    """Seconds of ``nbytes`` from one process's shared memory to another's over raw TCP, all streams at once."""
    open_ones = listeners(streams)
    try:
        ports = [listener.getsockname()[1] for listener in open_ones]
        sent = pool.start(sender, streams, nbytes, repeats, str(directory), open_ones)
        taken = pool.start(receiver, streams, nbytes, repeats, str(directory), ports)
        took: list[float] = gather([sent, taken])[0]
        return took
    finally:
        for listener in open_ones:
            listener.close()
        pool.end()


def listeners(streams: int) -> list[socket.socket]:
    """One listening socket for each stream."""
    return [socket.create_server((HOST, 0)) for _ in range(streams)]


def _parts(directory: str, streams: int, nbytes: int) -> list[memoryview]:
    path = Path(directory) / f"loop-{os.getpid()}"
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
    path.unlink()
    populate(mapped)
    each = -(-nbytes // streams)
    return [memoryview(mapped)[i * each : (i + 1) * each] for i in range(streams)]


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
