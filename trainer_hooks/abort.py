"""Out of a hung collective: how each kind of process group is made to let go.

A collective blocks in C++ until its peers answer or a time-out of minutes passes. When the agent says that the
generation is over, nothing is worth waiting for, and every collective of the process is ended from the signal
thread: whoever waits for an aborted one gets an error, and whoever enters one later gets it at once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer_hooks import descriptors, resets, waiting

logger = logging.getLogger(__name__)

HOLD_S = 1.0
"""How long aborted connections are kept open: survivors hear of a new generation within tens of milliseconds of one
another, and none should see another's connection close before it has aborted its own."""

SET_UP_S = 120
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

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that ``abort`` began is done; False where that takes longer than ``timeout_s``."""


def gloo_loops() -> list[int]:
    """The epoll instances of gloo devices in this process.

    One is known by what it watches: the pipe of its deferred calls and its listening TCP socket, beside the
    connections of its pairs (gloo/transport/tcp/loop.cc). Python's selectors and libuv watch no pipe together with
    a listening socket. So connections that gloo opened late are found too, and the store's, the agent's and the
    vault's never are.
    """
    found = []
    for event_poll in descriptors.event_polls():
        fds = descriptors.watched(event_poll)
        if any(map(descriptors.is_pipe, fds)) and descriptors.any_listening(fds):
            found.append(event_poll)
    return found


def gloo_connections() -> list[socket.socket]:
    """Duplicates of the connections that gloo has open."""
    return [copy for loop in gloo_loops() for copy in descriptors.connections(descriptors.watched(loop))]


class GlooBackend:
    """Ends gloo's collectives by shutting its connections; ``ProcessGroupGloo.abort`` does not wake a waiter.

    They are shut for reading, and kept open for HOLD_S by duplicates. gloo's thread then reads the end of the stream,
    which wakes those that wait. Were a connection closed at once, or shut for writing, a write that this or the other
    process is about to make would fail; gloo ignores that and leaves the operation behind it waiting (pair.cc,
    ``Pair::write`` on EPIPE and ECONNRESET).
    """

    name = "gloo"

    def prepare(self) -> None:
        waiting.install()
        resets.install(gloo_connections)

    def connect(self, device: torch.device) -> None:
        """gloo connects all ranks when a group is made."""

    def settle(self, timeout_s: float) -> bool:
        return True

    def abort(self) -> int:
        held = [copy for loop in gloo_loops() for copy in self._shut_connections_of(loop)]
        if held:
            timer = threading.Timer(HOLD_S, descriptors.close_all, [held])
            timer.daemon = True
            timer.start()
        return len(held)

    @staticmethod
    def _shut_connections_of(loop: int) -> list[socket.socket]:
        watched = partial(descriptors.watched, loop)
        return descriptors.shut_connections(watched(), watched, socket.SHUT_RD)


class NcclBackend:
    """Ends NCCL's communicators with ``ncclCommAbort``, each from a thread of its own.

    Aborting one communicator may wait for another of the same process, so all are begun together. gloo carries the
    CPU tensors of the same groups and is ended with them.

    All communicators of the process are non-blocking: the set-up of a blocking one cannot be aborted. The set-up of a
    non-blocking one can, until a collective is called: torch then waits for the set-up under a lock that an abort
    needs, for SET_UP_S at most. Therefore ``connect`` comes first, and no collective before all ranks are known to have
    called it.
    """

    name = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self._gloo = GlooBackend()
        self._begun: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """torch's own watchdog must neither end the process nor abort behind our back: that is decided here."""
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")  # also of the groups that users make
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(SET_UP_S))
        resets.install(gloo_connections)

    def connect(self, device: torch.device) -> None:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        backend.eager_connect_single_device(device)

    def abort(self) -> int:
        ended = self._gloo.abort()
        for backend in self._communicators():
            thread = threading.Thread(target=self._abort_one, args=(backend,), name="everstep-nccl-abort", daemon=True)
            with self._lock:
                if id(backend) in self._begun:
                    continue
                self._begun[id(backend)] = thread
                thread.start()
            ended += 1
        return ended

    def settle(self, timeout_s: float) -> bool:
        deadline = perf_counter() + timeout_s
        with self._lock:
            begun = list(self._begun.values())
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
                self._begun.pop(id(backend), None)


def backend_named(name: str) -> CollectiveBackend:
    """The backend for a setting of ``auto``, ``gloo`` or ``nccl``."""
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    return NcclBackend() if name == "nccl" else GlooBackend()
