"""An abort ends the collectives that wait for a missing rank, and no other communication."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from everstep_trainer.config import HookSettings
from everstep_trainer.runtime import abort
from everstep_trainer.runtime.abort import (
    NCCL_SETUP_TIMEOUT_S,
    GlooBackend,
    NcclBackend,
    gloo_event_loops,
    make_backend,
)
from everstep_trainer.runtime.process_group import Rendezvous
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.node_ranks import host_store

WORLD = 3


def wait_until_aborted(port: int, rank: int, elements: int) -> dict[str, object]:
    """Join a group, wait in an all-reduce that rank 0 never enters, and abort on request.

    Without ``elements``, wait for a message of rank 0 instead.
    """
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = GlooBackend()
    backend.prepare()
    dist.init_process_group("gloo", store=PrefixStore("g", store), rank=rank, world_size=WORLD)
    dist.all_reduce(torch.ones(1))
    store.set(f"ready/{rank}", "")
    if rank == 0:
        signal.pause()
    with socket.socket() as listener, socket.create_connection(("127.0.0.1", port)) as bystander:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        aborted: list[int] = []

        def abort_on_request() -> None:
            store.wait(["abort"], timedelta(seconds=60))
            aborted.append(backend.abort())
            aborted.append(backend.abort())

        thread = threading.Thread(target=abort_on_request)
        thread.start()
        error = ""
        try:
            dist.all_reduce(torch.ones(elements)) if elements else dist.recv(torch.ones(1), 0)
        except RuntimeError as caught:
            error = str(caught)
        thread.join()
        bystander.getpeername()
        store.set(f"alive/{rank}", "")  # the store's connection still works
        return {"error": error, "aborted": aborted, "loops": len(gloo_event_loops())}


@pytest.mark.parametrize("elements", [1, 3_000_000, 0])
def test_rank_waiting_for_a_stopped_peer_is_freed(forks: ForkPool, elements: int) -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        port_file = Path(folder) / "port"
        forks.start(host_store, str(port_file))
        port = int(until(lambda: port_file.read_text() if port_file.exists() else "", "the store serves"))
        ranks = [forks.start(wait_until_aborted, port, rank, elements) for rank in range(WORLD)]
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
        store.wait([f"ready/{rank}" for rank in range(WORLD)])
        os.kill(ranks[0].pid, signal.SIGSTOP)
        store.set("abort", "")
        for rank in ranks[1:]:
            outcome = rank.result()
            assert outcome["error"]
            assert outcome["aborted"][0] == WORLD - 1, "the abort ends exactly the connections of the group"
            assert outcome["loops"] == 1


def test_only_connections_to_the_named_port_are_found_and_shut() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, listener.accept()[0] as theirs:
            assert abort.connections_to_port(port) == [ours.fileno()]
            held = abort.shut_connections([ours.fileno()], lambda: [ours.fileno()])
            abort.close_sockets(held)
            assert len(held) == 1
            assert theirs.recv(1) == b""


def test_reused_descriptor_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with socket.socket() as listener, ours, theirs:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as connection, listener.accept()[0] as far:
            assert abort.shut_connections([connection.fileno()], list) == []
            far.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_unix_sockets_pipes_and_closed_numbers_are_never_shut() -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    os.close(reading)
    with ours, theirs:
        fds = [ours.fileno(), writing, reading]
        assert abort.shut_connections(fds, lambda: fds) == []
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
    os.close(writing)


def test_the_backend_follows_the_setting_and_the_machine() -> None:
    assert isinstance(make_backend("gloo"), GlooBackend)
    assert isinstance(make_backend("nccl"), NcclBackend)
    expected = NcclBackend if torch.cuda.is_available() and dist.is_nccl_available() else GlooBackend
    assert isinstance(make_backend("auto"), expected)


def nccl_environment() -> dict[str, str | None]:
    NcclBackend().prepare()
    return {name: os.environ.get(f"TORCH_NCCL_{name}") for name in ("USE_COMM_NONBLOCKING", "NONBLOCKING_TIMEOUT")}


def test_all_nccl_communicators_are_set_up_without_blocking(forks: ForkPool) -> None:
    """This includes groups that a training function creates without options."""
    expected = {"USE_COMM_NONBLOCKING": "1", "NONBLOCKING_TIMEOUT": str(NCCL_SETUP_TIMEOUT_S)}
    assert forks.start(nccl_environment).result() == expected


class Communicator:
    """A communicator whose abort lasts until the test releases it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        assert self.may_end.wait(60)


def test_nccl_aborts_are_begun_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, communicator = NcclBackend(), Communicator()
    monkeypatch.setattr(GlooBackend, "abort", lambda _: 0)
    monkeypatch.setattr(backend, "_communicators", lambda: [communicator])
    assert [backend.abort(), backend.abort()] == [1, 0]
    assert not backend.wait_aborted(0.0)
    communicator.may_end.set()
    assert backend.wait_aborted(60.0)
    assert communicator.aborts == 1


def test_broken_groups_are_destroyed_after_their_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying a group waits for its hung collectives, while it holds the lock that the abort needs."""
    done: list[str] = []
    backend = NcclBackend()
    monkeypatch.setattr(backend, "abort", lambda: done.append("abort"))
    monkeypatch.setattr(backend, "wait_aborted", lambda timeout_s: done.append("settle"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    rendezvous = Rendezvous(backend, HookSettings())
    rendezvous.leave(must_abort=True)
    rendezvous.leave(must_abort=False)
    assert done == ["abort", "settle", "destroy", "destroy"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_set_up_with_a_missing_peer_can_be_aborted(forks: ForkPool) -> None:
    """One device is enough: rank 1 never calls, so the communicator's non-blocking setup never completes."""
    assert tuple(forks.start(abort_nccl_set_up).result()) == (1, True, 8.0)


def abort_nccl_set_up() -> tuple[int, bool, float]:
    """Return the number of aborted communicators, whether the abort ended in time, and a later sum on the GPU."""
    backend, device = NcclBackend(), torch.device("cuda", 0)
    backend.prepare()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl", store=store, rank=0, world_size=2)
    backend.connect(device)
    ended = backend.abort()
    settled = backend.wait_aborted(60.0)
    return ended, settled, float(torch.ones(8, device=device).sum())
